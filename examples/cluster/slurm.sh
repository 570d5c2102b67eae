#!/usr/bin/env bash
# sbatch slurm.sh: Qwen3-235B on 8 nodes of 8 H200s. Every node runs the same script: the first one prepares, starts Ray's
# head, waits for the others, and submits the run; the others join it, and end with it.
#SBATCH --job-name=miles
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
set -euo pipefail

# On a disk that all nodes see.
SHARED=${SHARED:-$HOME/miles}
MILES=${MILES:-$SHARED/code}
# HF_TOKEN and WANDB_API_KEY come from the environment of sbatch: never write them here.

srun --kill-on-bad-exit=1 "$MILES/.venv/bin/python" "$MILES/scripts/run_qwen3_235b_a22b.py" full-train \
  --hardware H200 \
  --model-dir "$SHARED/models" --data-dir "$SHARED/datasets" --output-dir "$SHARED/runs" \
  --run-id "${RUN_ID:-qwen3-235b}"
