#!/usr/bin/env bash
# Installs the Debian packages of packages.txt that are missing. Asks nothing, may run again, needs root or sudo only
# when something is missing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

mapfile -t wanted < <(grep -v '^#' "$here/packages.txt")
missing=()
for package in "${wanted[@]}"; do
  [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "install: all ${#wanted[@]} packages are there"
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || { echo "install: missing ${missing[*]}; run this as root" >&2; exit 1; }
  as_root=(sudo)
fi
echo "install: ${#missing[@]} of ${#wanted[@]} packages are missing: ${missing[*]}"
log=$(mktemp)
if ! { "${as_root[@]}" apt-get update &&
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } \
  >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "install: apt failed; the whole log is $log" >&2
  exit 1
fi
rm -f "$log"
echo "install: done"
