"""FP8 weights in an engine on a CPU, for tests of their way: SGLang's own product there needs AMX.

Names, shapes, loaders and updates are SGLang's. Its layers compute with the values that the codes stand for, and do not
quantise what they multiply them by.
"""

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from miles.hf.block_formats import BlockFormat

METHOD = "sglang.srt.layers.quantization.fp8.Fp8LinearMethod."


def _keep_layout(method: Any, layer: torch.nn.Module) -> None:
    """In place of Fp8LinearMethod.process_weights_after_loading_block_quant."""
    layer.weight.requires_grad_(False)
    layer.weight_scale_inv.requires_grad_(False)


def _apply(method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In place of Fp8LinearMethod.apply."""
    down, across = method.quant_config.weight_block_size
    blocks = BlockFormat("F8_E4M3", ("F32",), (down, across))
    weight = blocks.decode(layer.weight.data, layer.weight_scale_inv.data, x.dtype)
    return F.linear(x, weight, bias)


def _activation_dtypes(original: Any, *args: Any) -> list[torch.dtype]:
    """Around Fp8Config.get_supported_act_dtypes."""
    return [*original(*args), torch.float32]


def register() -> None:
    """Hook it into this process's server, before SGLang loads its plugins."""
    HookRegistry.register(METHOD + "process_weights_after_loading_block_quant", _keep_layout, HookType.REPLACE)
    HookRegistry.register(METHOD + "apply", _apply, HookType.REPLACE)
    dtypes = "sglang.srt.layers.quantization.fp8.Fp8Config.get_supported_act_dtypes"
    HookRegistry.register(dtypes, _activation_dtypes, HookType.AROUND)
