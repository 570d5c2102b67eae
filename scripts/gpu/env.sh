# source scripts/gpu/env.sh: the staged packages and this checkout, for python3 on the GPU machine.
export PYTHONPATH=~/site:~/site/nvidia_cutlass_dsl/python_packages:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE
