"""The Megatron-core trainer: model building, process groups, training steps, checkpoints, CPU support."""

import warnings

# Said six times at import where Transformer Engine and Apex are not installed; the parts used instead are ours or torch's.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
