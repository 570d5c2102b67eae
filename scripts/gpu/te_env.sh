# source scripts/gpu/te_env.sh after env.sh: Transformer Engine, with torch's cuDNN instead of the system's older one.
SP=$(python3 -c "import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))")/nvidia
export CUDNN_HOME=$SP/cudnn LD_LIBRARY_PATH=$SP/nccl/lib:$SP/cudnn/lib:$SP/cu13/lib:$LD_LIBRARY_PATH PYTHONPATH=~/te:$PYTHONPATH
