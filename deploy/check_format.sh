#!/usr/bin/env bash
# Every C++ file is as clang-format leaves it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git ls-files '*.cc' '*.h' '*.cu' 2>/dev/null | grep . >/tmp/bmuf-format.$$ ||
  find core server client worker tests -name '*.cc' -o -name '*.h' -o -name '*.cu' >/tmp/bmuf-format.$$
trap 'rm -f /tmp/bmuf-format.$$' EXIT
xargs -a /tmp/bmuf-format.$$ clang-format --dry-run --Werror
echo "format: $(wc -l </tmp/bmuf-format.$$) files"
