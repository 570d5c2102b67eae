"""Weights as FP8 engines and checkpoints hold them: e4m3 codes, and a float32 scale for each block of 128 x 128.

Shape letters: O output rows and I input columns of a weight; P and Q its blocks down and across.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

BLOCK = 128
SCALES = "_scale_inv"  # behind a weight's name
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_ENDINGS = ("_proj.weight", ".kv_a_proj_with_mqa.weight")


def quantise(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [O, I], float32 scales [P, Q]): a value is code x scale of its block, of which the last may be smaller.

    A block's largest number becomes e4m3's largest. A block of zeros has scale 1.
    """
    rows, columns = weight_OI.shape
    padded = F.pad(weight_OI.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [P, 128, Q, 128]
    scales_PQ = blocks.abs().amax((1, 3)) / _LARGEST
    scales_PQ = torch.where(scales_PQ > 0, scales_PQ, 1.0)
    # Rounding of the division may carry the largest number past the end, where the cast gives NaN.
    codes = (blocks / scales_PQ[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales_PQ


def becomes_fp8(name: str, shape: Iterable[int]) -> bool:
    """Whether an FP8 checkpoint holds this tensor in blocks: projections of layers, but no routers, tables and head."""
    return name.endswith(_ENDINGS) and len(tuple(shape)) == 2


def quantization_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What config.json says of a checkpoint with these tensors, whose `becomes_fp8` ones are quantised."""
    plain = [name for name, shape in shapes.items() if len(shape) > 1 and not becomes_fp8(name, shape)]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in plain),
    }
