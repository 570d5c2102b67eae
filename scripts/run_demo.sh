#!/usr/bin/env bash
# run_demo.sh [SEED]: a fresh tiny Qwen3 learns to reverse digits. Warm-up by supervised steps, then GRPO; all of it in
# runs/demo, which is emptied first. What each run does stands in scripts/demo/*.yaml. SEED (0) changes weights, prompts
# and samples.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
python=.venv/bin/python
out=runs/demo
seed=${1:-0}

prompts() {  # prompts NUM SEED FILE [--exclude FILE...]
  local num=$1 file_seed=$2 file=$3
  shift 3
  "$python" -m miles.tools.make_prompts --task reverse --num "$num" --seed "$file_seed" --output "$out/$file" "$@"
}
train() {
  "$python" train.py --config "scripts/demo/$1.yaml" --seed $((1234 + seed)) --rollout-seed $((42 + seed))
}

rm -rf "$out"
mkdir -p "$out"
"$python" -m miles.tools.make_tiny_checkpoint --seed "$seed" --output "$out/fresh"
prompts 4000 $((3 * seed + 1)) sft.jsonl
prompts 4000 $((3 * seed + 2)) train.jsonl
prompts 128 $((3 * seed + 3)) eval.jsonl --exclude "$out/sft.jsonl" "$out/train.jsonl"
train sft
train grpo
