"""The Megatron-core trainer: model building, process groups, training steps, checkpoints, CPU support."""

import logging
import warnings

# Said six times at import where Transformer Engine and Apex are not installed; the parts used instead are ours or torch's.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
# Said by torch where a CUDA toolkit is installed without a GPU, and by Megatron at each build, of GPTModel (it gets no new
# features) and of buffer layouts that it computes itself.
for name in ("torch.utils.cpp_extension", "megatron.core.models.gpt.gpt_model", "megatron.core.distributed"):
    logging.getLogger(name).setLevel(logging.ERROR)
