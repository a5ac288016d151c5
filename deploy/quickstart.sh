#!/usr/bin/env bash
# From a fresh Debian 12 to a trained model in one command: installs, builds, starts a coordinator and worker processes
# on Fashion-MNIST, kills one worker half-way, starts a replacement, and ends by itself.
#   deploy/quickstart.sh [--workers 4] [--model mlp|cnn] [--rounds R] [--keep DIR] [--no-kill]
# Last line: accuracy A rounds R workers N seconds S. Exit 0 only if the accuracy target was reached.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

workers=4 model=mlp rounds='' keep='' kill_one=true
usage() { sed -n '2,6p' "$0" | sed 's/^# \{0,1\}//'; }
while (($# > 0)); do
  case $1 in
    --workers) workers=$2; shift ;;
    --model) model=$2; shift ;;
    --rounds) rounds=$2; shift ;;
    --keep) keep=$2; shift ;;
    --no-kill) kill_one=false ;;
    -h | --help) usage; exit 0 ;;
    *) echo "quickstart: unknown option $1" >&2; usage >&2; exit 64 ;;
  esac
  shift
done
[[ $workers =~ ^[1-9][0-9]?$ ]] || { echo "quickstart: --workers must be 1 to 99, not \"$workers\"" >&2; exit 64; }

# The settings that tests/bench/README.md found for these models.
case $model in
  mlp) rounds=${rounds:-470} block_steps=10 every=20 target=0.88 ;;
  cnn) rounds=${rounds:-70} block_steps=20 every=5 target=0.90 ;;
  *) echo "quickstart: --model must be mlp or cnn, not \"$model\"" >&2; exit 64 ;;
esac

deploy/install.sh
echo "quickstart: building (some minutes the first time, seconds afterwards)"
bazel build --config=opt //server:bmuf-coordinator //client/ctl:bmufctl //worker:bmuf-worker 2>&1 |
  grep -E '^(ERROR|INFO: Elapsed|INFO: Build)' || true
bin=$(bazel info --config=opt bazel-bin 2>/dev/null)
coordinator=$bin/server/bmuf-coordinator ctl=$bin/client/ctl/bmufctl worker=$bin/worker/bmuf-worker
for program in "$coordinator" "$ctl" "$worker"; do
  [[ -x $program ]] || { echo "quickstart: the build left no $program" >&2; exit 70; }
done

dir=${keep:-$(mktemp -d)}
mkdir -p "$dir"
declare -A pids=()
coordinator_pid=''
cleanup() {
  local code=$?
  trap - EXIT INT TERM
  for pid in "${pids[@]}" $coordinator_pid; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}" $coordinator_pid; do wait "$pid" 2>/dev/null || true; done
  [[ -n $keep ]] || rm -rf "$dir"
  exit $code
}
trap cleanup EXIT INT TERM

cat >"$dir/coordinator.yaml" <<EOF
listen: 127.0.0.1:0
exit_when_done: true
jobs:
  - name: fashion
    config:
      outer:
        variant: nesterov
        block_learning_rate: 0.7
        block_momentum: 0.9
      barrier:
        min_workers: 1
        expected_workers: $workers
        start_timeout: 60s
        collect_timeout: 2m
      block_steps: $block_steps
      max_rounds: $rounds
      lease: 3s
EOF
"$coordinator" --config "$dir/coordinator.yaml" --log-format text --port-file "$dir/port" >"$dir/coordinator.log" 2>&1 &
coordinator_pid=$!
for _ in {1..100}; do
  [[ -s $dir/port ]] && break
  kill -0 $coordinator_pid 2>/dev/null || { cat "$dir/coordinator.log" >&2; exit 70; }
  read -rt 0.1 <> <(:) || true
done
server=$(head -n 1 "$dir/port")
echo "quickstart: coordinator at $server, log $dir/coordinator.log"

start_worker() { # start_worker NAME
  "$worker" --coordinator "$server" --job fashion --name "$1" --model "$model" --devices cpu:1 --batch-size 64 \
    --lr 0.05 --schedule linear --momentum 0.9 --eval-every 50 >"$dir/$1.log" 2>&1 &
  pids[$1]=$!
}
began=$SECONDS
for ((i = 0; i < workers; ++i)); do start_worker "w$i"; done

# One line a round; half-way the last worker is killed the hard way and another takes its place.
half=$((rounds / 2)) killed=false
while IFS= read -r line; do
  echo "$line"
  if $kill_one && ! $killed && ((workers > 1)) && [[ $line =~ round\ ([0-9]+) ]] && ((BASH_REMATCH[1] >= half)); then
    killed=true
    victim=w$((workers - 1))
    echo "quickstart: kill -9 of $victim; a replacement starts"
    kill -9 "${pids[$victim]}"
    wait "${pids[$victim]}" 2>/dev/null || true
    unset "pids[$victim]"
    start_worker "w$workers"
  fi
done < <("$ctl" --server "$server" watch fashion --every $every)

if $killed; then
  echo "quickstart: what the coordinator said of $victim and w$workers:"
  grep -E "\[fashion [0-9]+ ($victim|w$workers)\]" "$dir/coordinator.log" | sed 's/^/  /' || true
fi

codes=0
for name in "${!pids[@]}"; do
  wait "${pids[$name]}" || { echo "quickstart: $name ended with $?; its log:" >&2; tail -n 5 "$dir/$name.log" >&2; codes=1; }
  unset "pids[$name]"
done
wait $coordinator_pid || { echo "quickstart: the coordinator ended with $?" >&2; tail -n 5 "$dir/coordinator.log" >&2; codes=1; }
coordinator_pid=''
accuracy=$(grep -ho 'final accuracy [0-9.]*' "$dir"/w*.log | awk '{print $3}' | sort | tail -n 1)
echo "accuracy ${accuracy:-none} rounds $rounds workers $workers seconds $((SECONDS - began))"
((codes == 0)) && awk -v a="${accuracy:-0}" -v t=$target 'BEGIN { exit !(a >= t) }'
