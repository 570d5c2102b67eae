#!/usr/bin/env bash
# The demo: a fresh tiny Qwen3 learns to reverse digits. Warm-up by supervised steps, then GRPO; all of it in runs/demo,
# which is emptied first. What each run does stands in scripts/demo/*.yaml.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
python=.venv/bin/python
out=runs/demo

rm -rf "$out"
mkdir -p "$out"
"$python" -m miles.tools.make_tiny_checkpoint --output "$out/fresh"
"$python" -m miles.tools.make_prompts --task reverse --num 4000 --seed 1 --output "$out/sft.jsonl"
"$python" -m miles.tools.make_prompts --task reverse --num 4000 --seed 2 --output "$out/train.jsonl"
"$python" -m miles.tools.make_prompts --task reverse --num 128 --seed 3 --output "$out/eval.jsonl" \
  --exclude "$out/sft.jsonl" "$out/train.jsonl"
"$python" train.py --config scripts/demo/sft.yaml
"$python" train.py --config scripts/demo/grpo.yaml
