#!/usr/bin/env bash
# Installs what is missing, builds everything, runs every test. Last line: "N passed, N failed". Non-zero on a failure.
#   deploy/test.sh            everything
#   deploy/test.sh --quick    without sanitizers, the clang pass and the style checks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick=false
[[ ${1:-} == --quick ]] && quick=true

deploy/install.sh

# Named one by one: "//..." would follow the convenience links of another output base into copies of the tree.
everything="//client/... //core/... //proto/... //server/... //tests/... //third_party/... //worker/..."
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

# Adds up the test cases of one configuration: gtest and pytest write one <testcase> each, a plain test counts as one.
count() { # count FLAGS...
  local line
  line=$(/usr/bin/python3 deploy/count_cases.py "$(bazel info "$@" bazel-testlogs 2>/dev/null)")
  echo "    $line"
  read -r p _ f _ <<<"$line"
  passed_cases=$((passed_cases + p)) failed_cases=$((failed_cases + f))
}

run_tests() { # run_tests NAME FLAGS-AND-TARGETS...
  local name=$1
  shift
  step "$name" bazel test --keep_going --build_tests_only "$@"
}

step "build" bazel build --config=opt //server:bmuf-coordinator //client/ctl:bmufctl //worker:bmuf-worker
run_tests "unit tests" --config=opt --test_tag_filters=unit -- $everything
run_tests "integration tests" --config=opt --test_tag_filters=integration --local_test_jobs=2 -- $everything
count --config=opt
if ! $quick; then
  run_tests "unit tests under ASan and UBSan" --config=asan --config=ubsan \
    --test_tag_filters=unit,-torch,-local --build_tag_filters=unit,-torch,-local -- $everything
  count --config=asan --config=ubsan
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
