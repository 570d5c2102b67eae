#!/usr/bin/env bash
# build_kit.sh KIT: fills .gpukit/ for stage.sh. KIT is the folder that holds build.sh, pins.txt and join.sh; the wheels
# in w1 are what Miles imports and neither the kit nor the GPU machine has.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=.venv/bin/python "${1:?usage: build_kit.sh KIT}/build.sh" .gpukit --model
rm -rf .gpukit/w1
grep -hE '^(antlr4-python3-runtime|latex2sympy2-extended|math-verify|pytest-asyncio|typeguard|tyro)==' \
  requirements.txt constraints.txt |
  xargs .venv/bin/python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux2014_x86_64 -d .gpukit/w1
