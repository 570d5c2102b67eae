"""The Megatron-core trainer: model building, process groups, training steps, checkpoints, CPU support."""

import logging
import warnings

# Said six times at import where Transformer Engine and Apex are not installed; other parts are used instead.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
# Said by torch where a CUDA toolkit is installed without a GPU, and by Megatron at each build: that GPTModel gets no
# new features, and that it computes buffer layouts itself.
for name in ("torch.utils.cpp_extension", "megatron.core.models.gpt.gpt_model", "megatron.core.distributed"):
    logging.getLogger(name).setLevel(logging.ERROR)
