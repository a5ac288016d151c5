#!/usr/bin/env bash
# clang-tidy over our own sources (the pure parts). With file names: only these.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$(bazel info --config=opt bazel-bin 2>/dev/null)
flags=(-std=c++17 -I. "-I$bin" "-I$bin/proto" "-I$bin/third_party/googleapis"
  -DSPDLOG_COMPILED_LIB -DSPDLOG_SHARED_LIB -DSPDLOG_FMT_EXTERNAL)
if (($# == 0)); then
  # What decides, computes and keeps. Files that include gRPC or libtorch cost half a minute each and are left to the
  # compilers' warnings.
  mapfile -t files < <(find core server/engine server/model server/storage server/ops -name '*.cc' ! -name '*_test.cc' \
    ! -name 'kernels_*' ! -name '*conformance*' ! -name 'effect_text*')
else
  files=("$@")
fi
printf '%s\n' "${files[@]}" | xargs -P 2 -n 4 sh -c 'clang-tidy --quiet "$@" -- '"${flags[*]}"' 2>/dev/null' tidy
echo "clang-tidy: ${#files[@]} files"
