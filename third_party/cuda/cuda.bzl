"""cuda_library: a .cu file compiled with nvcc where the toolkit exists, else an empty library."""

load("@local_cuda//:defs.bzl", "CUDA_ROOT", "HAVE_CUDA")

# --fmad=false: the scalar kernels are the definition and they do not contract.
_NVCC_FLAGS = " ".join([
    "-std=c++17",
    "-O3",
    "--fmad=false",
    "-gencode arch=compute_80,code=sm_80",
    "-gencode arch=compute_90,code=sm_90",
    "-gencode arch=compute_90,code=compute_90",
    "-Xcompiler -fPIC,-Wall,-ffp-contract=off",
    "-I.",
    "-DBMUF_HAVE_CUDA=1",
])

def cuda_library(name, src, hdrs = [], deps = [], visibility = None):
    """Compiles one .cu file.

    Args:
      name: the library.
      src: the .cu file.
      hdrs: plain headers that both the .cu file and its users include; they include nothing but the C++ library.
      deps: C++ libraries that users of hdrs need.
      visibility: as in cc_library.
    """
    objects = []
    if HAVE_CUDA:
        native.genrule(
            name = name + "_object",
            srcs = [src] + hdrs,
            outs = [name + ".o"],
            cmd = "%s/bin/nvcc %s -c $(location %s) -o $@" % (CUDA_ROOT, _NVCC_FLAGS, src),
        )
        objects = [":" + name + "_object"]
    native.cc_library(
        name = name,
        srcs = objects,
        hdrs = hdrs,
        linkstatic = True,
        deps = deps + ["@local_cuda//:cudart"],
        visibility = visibility,
    )
