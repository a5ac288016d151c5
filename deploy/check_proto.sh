#!/usr/bin/env bash
# Lints the protos with buf (STANDARD + COMMENTS). Needs npx; the linter itself is fetched once into the cache below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=${XDG_CACHE_HOME:-$HOME/.cache}/bmuf-tools
if [[ ! -x $tools/node_modules/.bin/buf ]]; then
  mkdir -p "$tools"
  npm install --silent --no-audit --no-fund --prefix "$tools" @bufbuild/buf@1.75.0 >/dev/null
fi
"$tools/node_modules/.bin/buf" lint proto
echo "proto lint: clean"
