#!/usr/bin/env bash
# Runs one pytest file: $1 is the file, then NAME=path for each program under test, then --stubs path/of/a/stub.
set -euo pipefail
file=$1
shift
while (($#)); do
  case $1 in
    --stubs)
      # The stub is .../python/bmuf/v1/x_pb2.py; Python wants the folder above bmuf/.
      stubs=$(dirname "$(dirname "$(dirname "$PWD/$2")")")
      shift 2
      ;;
    *=*)
      name=${1%%=*}
      name=${name^^}
      export "BMUF_TEST_${name//-/_}=$PWD/${1#*=}"
      shift
      ;;
    *)
      echo "unknown argument: $1" >&2
      exit 2
      ;;
  esac
done
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY grpc_proxy
export PYTHONPATH="$stubs:$(dirname "$PWD/$file")"
export PYTHONDONTWRITEBYTECODE=1
exec /usr/bin/python3 -m pytest -q ${XML_OUTPUT_FILE:+--junitxml="$XML_OUTPUT_FILE"} -p no:cacheprovider --basetemp="${TEST_TMPDIR:?}/pytest" --durations=5 "$file"
