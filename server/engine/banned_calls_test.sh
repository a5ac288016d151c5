#!/bin/sh
# The engine decides on its events alone: its sources may not name a clock, a random number, a thread, a lock, a file or
# a log. The arguments are the sources.
set -eu
banned='absl::Now|(system|steady|high_resolution)_clock|Clock::|WallNow|\btime\(|gettimeofday|clock_gettime'
banned="$banned"'|\brand(om)?\(|\bsrand\(|random_device|mt19937|absl::BitGen|[sS]leep|[mM]utex|std::(thread|async|atomic)'
banned="$banned"'|spdlog|fopen|[io]?fstream|\b(std::)?(cout|cerr)\b|printf\(|getenv|unordered_map|flat_hash'
status=0
[ $# -ge 10 ] || { echo "expected the engine's sources as arguments, got $#"; exit 1; }
for file in "$@"; do
  if sed 's,//.*,,' "$file" | grep -nE "$banned"; then
    echo "$file: banned in the engine"
    status=1
  fi
done
# The pattern itself can fail.
echo 'auto t = absl::Now(); srand(1);' | grep -qE "$banned" || { echo "the pattern finds nothing"; exit 1; }
exit $status
