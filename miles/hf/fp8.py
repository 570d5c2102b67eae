"""Weights as FP8 engines and checkpoints hold them: e4m3 codes, and a float32 scale for each block of 128 x 128.

Shape letters: O output rows and I input columns of a weight; P and Q its blocks down and across.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F

from miles.hf.checkpoint import CheckpointIndex
from miles.hf.quantization import quantization_in
from miles.utils.errors import UserError

BLOCK = 128
SCALES = "_scale_inv"  # behind a weight's name
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# Elements that are quantised at a time: what that takes for a moment is eight times as many bytes, and more.
_PIECE = 2**24
_ENDINGS = ("_proj.weight", ".kv_a_proj_with_mqa.weight")


def quantise(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [O, I], float32 scales [P, Q]): a value is code x scale of its block, of which the last may be smaller.

    A block's largest number becomes e4m3's largest. A block of zeros has scale 1.
    """
    step = max(1, _PIECE // weight_OI.shape[1] // BLOCK) * BLOCK
    pieces = [_quantise(rows) for rows in weight_OI.split(step)]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])


def _quantise(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight_OI.shape
    padded = F.pad(weight_OI.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [P, 128, Q, 128]
    scales_PQ = blocks.abs().amax((1, 3)) / _LARGEST
    scales_PQ = torch.where(scales_PQ > 0, scales_PQ, 1.0)
    # Rounding of the division may carry the largest number past the end, where the cast gives NaN.
    codes = (blocks / scales_PQ[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales_PQ


def fp8_weights(index: CheckpointIndex) -> set[str]:
    """The weights that a checkpoint's FP8 form has in blocks: those of a checkpoint in FP8, else projections of layers.

    Raises:
        ValueError: there is no such form that engines read.
    """
    if index.quantised:
        formats = {(each.block_format.codes_dtype, each.block_format.block) for each in index.quantised.values()}
        if formats != {("F8_E4M3", (BLOCK, BLOCK))}:
            raise UserError(f"{index.folder} has weights in another form than FP8 blocks of {BLOCK} x {BLOCK}")
        return set(index.quantised)
    if any("experts" in name and len(shape) > 2 for name, shape in index.shapes.items()):
        raise UserError(f"{index.folder} has a layer's experts in one tensor, of which engines read no FP8 form")
    weights = {name for name, shape in index.shapes.items() if name.endswith(_ENDINGS) and len(shape) == 2}
    if not weights:
        raise UserError(f"{index.folder} has no projections (weights whose names end in {' or '.join(_ENDINGS)})")
    return weights


def fp8_config(index: CheckpointIndex, weights: Collection[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint with `weights` in FP8; one that is in FP8 has its own."""
    if index.quantised and (quantization := quantization_in(index.folder)):
        return quantization
    plain = [name for name, shape in index.shapes.items() if len(shape) > 1 and name not in weights]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in plain),
    }
