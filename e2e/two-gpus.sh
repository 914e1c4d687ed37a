#!/usr/bin/env bash
# Runs everything that is measured on two GPUs of one host and leaves tables, timelines and pictures in a folder.
# usage: e2e/two-gpus.sh [OUT]     BIN=folder of the binaries (make two-gpus builds them); SHAPE=llama-1b
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-docs/results/two-gpus} bin=${BIN:-bin} shape=${SHAPE:-llama-1b}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { echo; echo "== $*" >&2; }

step "the machine"
nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv | tee "$out/machine.csv"
nvidia-smi topo -m | tee "$out/topology.txt"
[ "$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)" -ge 2 ] || { echo "two GPUs are needed" >&2; exit 2; }

step "hand-over of 8,192 tokens: plain copy, in place, TCP; on one card and across two (goal: in place across two at least 0.70 of the plain copy)"
"$bin/cuda.test" -test.run '^$' -test.bench HandOver -test.benchtime 100x | tee "$out/handover.txt"

step "a model of the shape $shape"
"$bin/randmodel" --shape "$shape" --out "$work/model"

step "equal texts in three serving styles: a node on each card; two stages, and two ranks, over both"
both=(--node-flag all=--gpu=0,1)
{
  "$bin/localcluster" verify --device cuda --cases 12 --node-flag gen0=--gpu=1
  "$bin/localcluster" verify --device cuda --cases 8 "${both[@]}" --node-flag all=--pp=2
  "$bin/localcluster" verify --device cuda --cases 8 "${both[@]}" --node-flag all=--ranks=2
} | tee "$out/verify.txt"

step "the tail of running streams while long prompts arrive"
MERIDIAN_TEST_BIN=$bin "$bin/tailbench" --model "$work/model" --device cuda --out "$work/tail" ${TAIL_ARGS:-} | tee "$out/tail.md"

step "what is kept"
for run in "$work"/tail/streams-*/; do
  name=$(basename "$run")
  cat "$run"/traces/*.jsonl | tail -n 40 | gzip -9 >"$out/$name.jsonl.gz"
  for f in check.txt summary.txt advise.txt cdf.svg heat.svg; do cp "$run/$f" "$out/$name-$f"; done
done
cp "$work"/tail/*.json "$out/"
du -sh "$out"
