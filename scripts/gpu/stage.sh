#!/usr/bin/env bash
# Stages the GPU kit on a machine without a network, a part a call, since a call carries 64 MiB at most.
#
#   scripts/gpu/stage.sh PART...   copies .gpukit/PART's files to ~/kit
#   scripts/gpu/stage.sh --finish  unpacks what lies in ~/kit: packages to ~/site, SmolLM2-135M-Instruct to ~/smol_hf
#
# Then `source scripts/gpu/env.sh` before every program.
set -euo pipefail
cd "$(dirname "$0")/../.."
kit=~/kit
mkdir -p "$kit"
if [ "$1" != --finish ]; then
  for part in "$@"; do
    cp .gpukit/"$part"/* "$kit/"
  done
  echo "in $kit: $(ls "$kit" | tr '\n' ' ')"
  exit
fi
bash "$kit/join.sh" "$kit" ~/site
bash "$kit/join.sh" "$kit" ~/smollm2 m
python3 -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target ~/site "$kit"/*.whl
if [ -e "$kit/caches.tgz" ]; then
  tar -C ~ -xzf "$kit/caches.tgz"  # kernels compiled on an earlier machine
fi
source scripts/gpu/env.sh
python3 -m compileall -q -j 0 ~/site >/dev/null 2>&1 || true  # some packages carry templates that are not Python
python3 -m miles.tools.unpack_smollm2 --gguf ~/smollm2/model.gguf --output ~/smol_hf
ls -l ~/smol_hf
