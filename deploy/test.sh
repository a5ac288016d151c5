#!/usr/bin/env bash
# Installs what is missing, builds everything, runs every test. Last line: "N passed, N failed". Non-zero on a failure.
#   deploy/test.sh            everything
#   deploy/test.sh --quick    without sanitizers, the clang pass and the style checks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick=false
[[ ${1:-} == --quick ]] && quick=true

deploy/install.sh

failed_steps=()
passed_cases=0 failed_cases=0
start=$SECONDS

step() { # step NAME COMMAND...: runs it, prints its time, remembers a failure
  local name=$1 began=$SECONDS
  shift
  echo "=== $name"
  if "$@"; then
    echo "=== $name: ok, $((SECONDS - began)) s"
  else
    echo "=== $name: FAILED, $((SECONDS - began)) s"
    failed_steps+=("$name")
  fi
}

# Adds up the test cases of one Bazel test run: gtest and pytest write one <testcase> each, a plain test counts as one.
count() {
  local line
  line=$(/usr/bin/python3 deploy/count_cases.py "$(bazel info "$@" bazel-testlogs 2>/dev/null)" "$began_at")
  echo "    $line"
  read -r p _ f _ <<<"$line"
  passed_cases=$((passed_cases + p)) failed_cases=$((failed_cases + f))
}

bazel_test() { # bazel_test FLAGS...: also counts cases
  local code=0
  bazel test --noshow_progress --keep_going "$@" || code=$?
  return $code
}

run_tests() { # run_tests NAME CONFIG TARGETS-AND-FLAGS...
  local name=$1 config=$2
  shift 2
  began_at=$(date +%s)
  step "$name" bazel_test $config "$@"
  count $config
}

step "build" bazel build --config=opt //server:bmuf-coordinator //client/ctl:bmufctl //worker:bmuf-worker
run_tests "unit tests" "--config=opt" --test_tag_filters=unit --build_tests_only -- //...
run_tests "integration tests" "--config=opt" --test_tag_filters=integration --build_tests_only --local_test_jobs=2 -- //...
if ! $quick; then
  run_tests "unit tests under ASan and UBSan" "--config=asan --config=ubsan" \
    --test_tag_filters=unit,-torch,-local --build_tag_filters=unit,-torch,-local --build_tests_only -- //...
  step "clang thread-safety analysis" bazel build --config=clang-thread-safety -- //core/... //server/... //client/... \
    -//core/kernels/... -//server:all
  step "format" deploy/check_format.sh
  step "clang-tidy" deploy/check_tidy.sh
  if command -v npx >/dev/null; then
    step "proto lint" deploy/check_proto.sh
  else
    echo "=== proto lint: SKIPPED, there is no npx here (Debian package npm)"
  fi
fi

echo "all steps: $((SECONDS - start)) s"
for name in "${failed_steps[@]}"; do
  echo "failed: $name"
done
# A step without test cases (build, format, lint) counts as one when it fails.
extra=0
for name in "${failed_steps[@]}"; do [[ $name == *tests* ]] || extra=$((extra + 1)); done
if ((${#failed_steps[@]} > 0 && failed_cases + extra == 0)); then extra=${#failed_steps[@]}; fi
echo "$passed_cases passed, $((failed_cases + extra)) failed"
((${#failed_steps[@]} == 0 && failed_cases == 0))
