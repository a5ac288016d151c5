"""Compiler flags of Debian's libtorch."""

TORCH_COPTS = [
    "-isystem",
    "/usr/include/torch/csrc/api/include",
]
