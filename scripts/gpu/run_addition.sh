#!/usr/bin/env bash
# scripts/gpu/run_addition.sh MODEL [flags of train.py]: GRPO on two-digit additions with the checkpoint in MODEL.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
model=$(realpath "$1")
shift
mkdir -p runs/gpu
ln -sfn "$model" runs/gpu/smollm2
"$python" -m miles.tools.make_prompts --task addition --num 6000 --seed 1 --output runs/gpu/train.jsonl
"$python" -m miles.tools.make_prompts --task addition --num 256 --seed 2 --output runs/gpu/eval.jsonl \
  --exclude runs/gpu/train.jsonl
"$python" train.py --config scripts/gpu/smollm2_addition.yaml "$@"
