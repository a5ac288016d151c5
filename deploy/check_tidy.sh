#!/usr/bin/env bash
# clang-tidy over our own sources (without those that include libtorch). With file names: only these.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$(bazel info --config=opt bazel-bin 2>/dev/null)
flags=(-std=c++17 -I. "-I$bin" "-I$bin/proto" "-I$bin/third_party/googleapis"
  -DSPDLOG_COMPILED_LIB -DSPDLOG_SHARED_LIB -DSPDLOG_FMT_EXTERNAL)
if (($# == 0)); then
  mapfile -t files < <(find core/base core/config core/layout core/codec core/filter server client -name '*.cc' ! -name '*_test.cc' |
    xargs grep -L 'torch/')
else
  files=("$@")
fi
printf '%s\n' "${files[@]}" | xargs -P 2 -n 4 sh -c 'clang-tidy --quiet "$@" -- '"${flags[*]}"' 2>/dev/null' tidy
echo "clang-tidy: ${#files[@]} files"
