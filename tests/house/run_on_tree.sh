#!/usr/bin/env bash
# Runs a check on the source tree itself: $1 is the check, $2 a file at the tree's top, seen through its link.
set -euo pipefail
exec /usr/bin/python3 "$1" "$(dirname "$(readlink -f "$2")")"
