#!/usr/bin/env bash
# Runs all that is tested and measured on a card, from binaries that were built elsewhere (make card-kit): it needs no Go and no network.
#
# usage: run [--device cpu] [--budget SECONDS] [--limit PART=SECONDS]... [--out DIR] [PART...]
#   --device cpu  a rehearsal without a card: what runs through real processes does so on the processor, in small
#   --budget      of all parts together (1200); what does not fit is cut, and said to be
#   --limit       of one part, in place of its own
#   --out         folder of the results (results, beside this file): what each part said, and how it ended
#   PART          only these, whatever ran before; otherwise those that have not ended well yet, so that a second call goes on
#
# Exit: 0 all parts ran to their ends; 1 a part failed; 2 none failed, but a part was skipped or cut.
set -uo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PATH=$kit/bin:$PATH XDG_CACHE_HOME=$kit/cache # of compiled kernels
device=cuda budget=1200 out=$kit/results

# name, limit in seconds, cards it needs (node: one, if its nodes run on cards), what of its output stands in the table (the last line that matches). The most telling come first: a
# budget cuts the end.
parts() {
  cat <<'EOF'
machine     20 0 driver:
demo        60 node requests
table      260 1 goals:
handover   120 1 plain loopback
serving    170 node (goal
profile     60 node gap p50
accounting 100 1 longer
verify      60 node cases equal
verify-pp   60 node cases equal
verify-ranks 60 node cases equal
verify-procs 90 node cases equal
narrow     150 1 decode 64
stages      60 1 prefilled
loopback    40 0 plain loopback
tests      400 1 passed
memcheck    60 1 ERROR SUMMARY
racecheck   80 1 RACECHECK SUMMARY
soak       530 1 requests
EOF
}

skip() { echo "$*"; exit 77; } # a part that cannot run here says why
partly() { echo "$*"; exit 75; } # a part that ran, but not all of it

# gotest runs a test binary where its package's files are.
gotest() { (cd "$kit/gpu/cuda" && exec "$@"); }

# cluster adds what the rehearsal wants to a command of localcluster.
cluster() { localcluster "$1" --device "$device" "${@:2}"; }

# model makes a checkpoint of the layers of 1.24 B parameters, once.
model() {
  [ -f "$kit/model/config.json" ] && return
  rm -rf "$kit/model.new" && randmodel --shape llama-1b --out "$kit/model.new" && mv "$kit/model.new" "$kit/model"
}

# with_torch names the python that times the second column of the table and is asked for log probabilities.
with_torch() {
  if python3 -c 'import torch, transformers' 2>/dev/null; then export MERIDIAN_TRANSFORMERS=python3; else echo "without transformers: python3 has no torch and transformers"; fi
}

part_machine() {
  uname -srm
  nproc
  grep -m1 'model name' /proc/cpuinfo
  nvidia-smi --query-gpu=index,name,driver_version,memory.total,clocks.sm --format=csv 2>&1 && nvidia-smi topo -m
  echo "driver: ${reason:-$cards cards}"
}

part_demo() {
  rm -rf "$out/demo"
  cluster demo --dir "$out/demo" && rm -rf "$out"/demo/nats "$out"/demo/spool &&
    timeline export --format perfetto -o "$out/demo/demo.pftrace" "$out/demo/traces"
}

part_table() {
  with_torch
  gotest cuda.test -test.v -test.run '^$' -test.bench 'Table$' -test.benchtime 1x
}

part_handover() { gotest cuda.test -test.v -test.run '^$' -test.bench 'HandOver$' -test.benchtime 40x; }

part_serving() {
  [ "$device" = cuda ] || { cluster serving --streams 4 --prompt 64 --output 16 --warm 1s --time 3s --rounds 1; return; }
  model && cluster serving --model "$kit/model"
}

part_profile() {
  rm -rf "$out/profile"
  if [ "$device" = cuda ]; then model && set -- --model "$kit/model" --profile 300 || return; else set -- --streams 4 --prompt 64 --output 16 --profile 20; fi
  cluster serving --dir "$out/profile" --rounds 1 --warm 1s --time 2s "$@"
  local rc=$?
  rm -rf "$out"/profile/nats "$out"/profile/spool "$out"/profile/traces
  return $rc
}

part_accounting() { gotest account.test -test.v -test.run '^$' -test.bench OnOffOnTheCard -test.benchtime 30x; }

part_verify() { cluster verify --cases 12; }
part_verify-pp() { cluster verify --cases 8 --node-flag all=--pp=2; }
part_verify-ranks() { cluster verify --cases 8 --node-flag all=--ranks=2; }

# Ranks that are processes take two cards in turn where there are two.
part_verify-procs() {
  local flags=(--node-flag all=--ranks=2 --node-flag all=--rank-processes)
  [ "$device" != cuda ] || [ "$cards" -lt 2 ] || flags+=(--node-flag all=--gpu=0,1)
  cluster verify --cases 8 "${flags[@]}"
}

part_narrow() { gotest cuda.test -test.v -test.run '^$' -test.bench 'Narrow$' -test.benchtime 1x; }
part_stages() { gotest cuda.test -test.v -test.run '^$' -test.bench 'Stages$' -test.benchtime 3x; }
part_loopback() { gotest kvwire.test -test.v -test.run '^$' -test.bench 'HandOver$' -test.benchtime 10x; }

part_tests() {
  local rc=0
  with_torch
  gotest cuda.test -test.v -test.timeout 10m >"$out/tests.log" 2>&1 || rc=1
  gotest device.test -test.v -test.run 'Card|Windows' >>"$out/tests.log" 2>&1 || rc=1
  grep -A4 -E '^ *--- (FAIL|SKIP)|^panic|^fatal' "$out/tests.log"
  grep -E '(log probabilities|requests, .* cancelled)' "$out/tests.log"
  echo "$(grep -cE '^--- PASS' "$out/tests.log") passed, $(grep -cE '^--- FAIL' "$out/tests.log") failed, $(grep -cE '^--- SKIP' "$out/tests.log") skipped"
  return $rc
}

sanitize() {
  command -v compute-sanitizer >/dev/null || skip "compute-sanitizer is not on this machine"
  gotest compute-sanitizer --tool "$1" --error-exitcode 1 "$kit/bin/cuda.test" -test.v -test.run 'DecodeBatches|StepsThatFollow'
}
part_memcheck() { sanitize memcheck; }
part_racecheck() { sanitize racecheck; }

part_soak() {
  local span=$((limit - 50))
  [ "$span" -ge 20 ] || partly "$limit s are left: too few"
  [ "$span" -le 480 ] || span=480
  MERIDIAN_CARD_LOAD=${span}s gotest cuda.test -test.v -test.timeout 20m -test.run RandomLoad || return
  [ "$span" = 480 ] || partly "$span s of load, 480 were asked for"
}

part_two-gpus() { TAIL_ARGS="--rounds 1 ${TAIL_ARGS:-}" "$kit/e2e/two-gpus.sh" "$out/two-gpus"; }

# look counts the usable cards, or says why there is none.
look() {
  local text
  text=$(timeout 60 cuda.test -test.v -test.run '^TestTheCardsOfThisMachine$' 2>&1)
  cards=$(grep -c 'card [0-9]*: ' <<<"$text")
  reason=
  if [ "$cards" = 0 ]; then reason=$(sed -n 's/^ *[a-z_]*\.go:[0-9]*: *//p' <<<"$text" | head -1); reason=${reason:-$(tail -1 <<<"$text")}; fi
}

# one runs a part under its limit and leaves how it ended in NAME.state.
one() {
  local name=$1 limit=$2 needs=$3 why=$4 rc=0 how from=$SECONDS
  : >"$out/$name.txt"
  [ "$needs" != node ] || needs=$([ "$device" = cuda ] && echo 1 || echo 0)
  if [ "$cards" -lt "$needs" ]; then
    how="skipped: $([ "$cards" = 0 ] && echo "no usable card: $reason" || echo "$needs cards are needed, there is $cards")"
  elif [ "$limit" -lt 1 ]; then
    how="cut: $why"
  else
    echo "cut: the run ended here|0|$limit" >"$out/$name.state" # what a killed run leaves
    timeout -k 15 "$limit" bash "$kit/run" --part "$name" "$device" "$out" "$limit" "$cards" "$reason" 2>&1 | tee "$out/$name.txt"
    rc=${PIPESTATUS[0]}
    case $rc in
      0) how=ok ;;
      75) how="cut: $(tail -1 "$out/$name.txt")" ;;
      77) how="skipped: $(tail -1 "$out/$name.txt")" ;;
      124 | 137) how="cut: $why" ;;
      *) how="failed: exit $rc" ;;
    esac
  fi
  echo "$how|$((SECONDS - from))|$limit" >"$out/$name.state"
}

# summary is a line for each part that was asked for, or of all; and what it said, if it ran.
summary() {
  local name limit needs want state took worst=0
  printf '\n%-13s %7s %6s  %s\n' part seconds limit result
  while read -r name limit needs want; do
    if [ ! -f "$out/$name.state" ]; then
      [ $# = 0 ] && [ "$name" != two-gpus ] || continue
      echo "not run|-|$limit" >"$out/$name.state"
    fi
    [ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
    IFS='|' read -r state took limit <"$out/$name.state"
    printf '%-13s %7s %6s  %s\n' "$name" "$took" "$limit" "$state"
    grep -F -- "$want" "$out/$name.txt" 2>/dev/null | tail -1 | sed 's/[[:space:]]\+/ /g; s/^/                              /' | cut -c1-220
    case $state in ok) ;; failed*) worst=1 ;; *) [ $worst = 1 ] || worst=2 ;; esac
  done < <(parts; echo "two-gpus 600 2 goodput")
  return $worst
}

main() {
  local asked=() name limit needs want own= left
  declare -A limits
  while [ $# -gt 0 ]; do
    case $1 in
      --device) device=$2; shift ;;
      --budget) budget=$2; shift ;;
      --limit) limits[${2%%=*}]=${2#*=}; shift ;;
      --out) mkdir -p "$2" && out=$(cd "$2" && pwd) || exit 1; shift ;;
      -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$kit/run"; exit 0 ;;
      -*) echo "unknown option $1; try --help" >&2; exit 64 ;;
      *) asked+=("$1") ;;
    esac
    shift
  done
  case $device in cuda | cpu) ;; *) echo "--device $device: want cuda or cpu" >&2; exit 64 ;; esac
  for name in "${asked[@]}"; do
    declare -F "part_$name" >/dev/null || { echo "no part $name; there are: $(parts | cut -d' ' -f1 | xargs) two-gpus" >&2; exit 64; }
  done
  mkdir -p "$out"
  look
  while read -r -u 3 name limit needs want; do
    if [ ${#asked[@]} -gt 0 ]; then
      [[ " ${asked[*]} " == *" $name "* ]] || continue
    elif [ "$name" = two-gpus ] || grep -qs '^ok|' "$out/$name.state"; then
      continue
    fi
    limit=${limits[$name]:-$limit} left=$((budget - SECONDS)) own="after $limit s, its limit"
    if [ "$left" -lt "$limit" ]; then limit=$left own="the budget of $budget s was over"; fi
    printf '\n== %s: at most %s s; %s s of %s are over\n' "$name" "$limit" "$SECONDS" "$budget"
    one "$name" "$limit" "$needs" "$own"
    printf '== %s: %s\n' "$name" "$(tr '|' ' ' <"$out/$name.state")"
  done 3< <(parts; echo "two-gpus 600 2 goodput")
  summary "${asked[@]}" | tee "$out/summary.txt"
  exit "${PIPESTATUS[0]}"
}

if [ "${1:-}" = --part ]; then # one calls this, so that a limit ends all that the part has started
  device=$3 out=$4 limit=$5 cards=$6 reason=$7
  "part_$2"
else
  main "$@"
fi
