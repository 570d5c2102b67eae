"""What the ranks of `run_ranks` import, most of it; imported once, before they are forked. It starts no thread."""

import gc

import torch.distributed.checkpoint
import torch.distributed.tensor  # noqa: F401
from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: F401

import miles.backends.megatron_utils.actor
import miles.backends.megatron_utils.critic
import miles.tools.make_tiny_checkpoint  # noqa: F401
import tests.fast.conftest
import tests.fast.weight_sync.conftest  # noqa: F401

# No collection in a rank goes through all of this, or copies the pages that it shares with the other ranks.
gc.collect()
gc.freeze()
