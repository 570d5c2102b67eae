"""Keeps what SGLang derives from weights at their first use in step with the weights.

The routers of GLM-4.5 to 4.7 and 4.7-Flash score by a float32 copy of their weights, made at the first forward pass and
never again: after an update they would route by the weights before it.
"""

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

COPY, ORIGINAL = "_weight_fp32", "weight"
UPDATES = ("update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_disk")


@torch.no_grad()
def refresh(result, runner, *args, **kwargs) -> None:
    """After an update of a ModelRunner: write the copies anew, in place, since CUDA graphs read that memory."""
    for name, copy in runner.model.named_buffers():
        if name.endswith(f".{COPY}"):
            copy.copy_(runner.model.get_parameter(name.removesuffix(COPY) + ORIGINAL))


def register() -> None:
    """Hook it into this process's server, before SGLang loads its plugins."""
    for update in UPDATES:
        HookRegistry.register(f"sglang.srt.model_executor.model_runner.ModelRunner.{update}", refresh, HookType.AFTER)
