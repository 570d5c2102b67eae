#!/usr/bin/env bash
# build_kit.sh KIT [--te] [--cutlass]: fills .gpukit/ for stage.sh. KIT is the folder that holds build.sh, pins.txt and
# join.sh; the wheels in w1 are what Miles imports and neither the kit nor the GPU machine has, those in w2 what
# benchmarks/trl_peer.py needs. --te: Transformer Engine in t1 to t5; --cutlass: what DeepSeek engines import, c1 and on,
# w3 and w4.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=.venv/bin/python "${1:?usage: build_kit.sh KIT [--te] [--cutlass]}/build.sh" .gpukit --model "${@:2}"
rm -rf .gpukit/w?
download() {  # download PART < requirements
  xargs .venv/bin/python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux2014_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64 -d ".gpukit/$1"
}
grep -hE '^(antlr4-python3-runtime|latex2sympy2-extended|math-verify|pytest-asyncio|typeguard|tyro)==' \
  requirements.txt constraints.txt | download w1
grep -ohE '^(trl|pandas)==[^ ]*' requirements-peers.txt | download w2
if [[ " $* " == *" --cutlass "* ]]; then
  echo tilelang==0.1.11 | download w3
  echo z3-solver==4.15.4.0 torch-c-dlpack-ext==0.1.5 | download w4
fi
