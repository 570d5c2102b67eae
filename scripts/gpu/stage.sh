#!/usr/bin/env bash
# Stages the GPU kit on a machine without a network, a part a call, since a call carries 64 MiB at most.
#
#   scripts/gpu/stage.sh PART...   copies .gpukit/PART's files to ~/kit
#   scripts/gpu/stage.sh --finish  unpacks what lies in ~/kit: packages to ~/site, and, where their parts are there,
#                                  SmolLM2-135M-Instruct to ~/smol_hf, Transformer Engine to ~/te, cutlass to ~/site
#
# Then `source scripts/gpu/env.sh` before every program, and after it te_env.sh where it uses Transformer Engine. What
# runs in the background ends with its call: nothing can be unpacked while the next part is on its way.
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
for part in m:smollm2 t:te c:site; do
  if compgen -G "$kit/${part%:*}.piece.*" >/dev/null; then
    bash "$kit/join.sh" "$kit" ~/"${part#*:}" "${part%:*}"
  fi
done
python3 -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target ~/site "$kit"/*.whl
if [ -e "$kit/caches.tgz" ]; then
  tar -C ~ -xzf "$kit/caches.tgz"  # kernels compiled on an earlier machine
fi
source scripts/gpu/env.sh
python3 -m compileall -q -j 0 ~/site ~/te >/dev/null 2>&1 || true  # some packages carry templates that are not Python
if [ -e ~/smollm2/model.gguf ]; then
  python3 -m miles.tools.unpack_smollm2 --gguf ~/smollm2/model.gguf --output ~/smol_hf
  ls -l ~/smol_hf
fi
