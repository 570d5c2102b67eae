"""Weights that a checkpoint holds as codes of 8 or 4 bits, with a scale for each block of them.

The value of a weight is code x scale, a product that float32 holds exactly where scales are powers of two; so does
bfloat16.

Shape letters: R rows and C columns of a matrix; P and Q its blocks down and across; E experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from miles.utils.errors import UserError

# e2m1 (OCP Microscaling Formats 1.0, 5.3.3): a sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
# [256, 2]: the two values in a byte, of which the low half comes first.
_PAIRS = torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), 1)
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
# Elements that are decoded at a time: their float32 products stay in a processor's cache.
_PIECE = 2**18


@dataclass(frozen=True)
class BlockFormat:
    """How a weight is stored: the names and dtypes of its codes and scales, and what shares a scale.

    Args:
        codes_dtype: safetensors' name of it.
        scales_dtypes: any of them.
        block: rows and columns that share a scale.
        codes_end: a weight's codes are under its name and this.
        packed: a byte holds two codes of 4 bits.
        transposed: rows and columns of a stack of matrices are stored in the other order, and columns in groups that
            are a dimension of their own.
    """

    codes_dtype: str
    scales_dtypes: tuple[str, ...]
    block: tuple[int, int]
    codes_end: str = ""
    packed: bool = False
    transposed: bool = False

    def scale_names(self, weight: str) -> tuple[str, ...]:
        """The names that a weight's scales may have."""
        if self.codes_end:
            return (weight + "_scales",)
        return (weight + "_scale_inv", weight.removesuffix(".weight") + ".scale")

    def matrix_shape(self, codes_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the values, before they are transposed."""
        if self.transposed:
            codes_shape = (*codes_shape[:-2], codes_shape[-2] * codes_shape[-1])
        return (*codes_shape[:-1], codes_shape[-1] * (2 if self.packed else 1))

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values, each product rounded once to `dtype`, on the codes' device."""
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        scales = scales.float().to(codes.device)
        shape = self.matrix_shape(tuple(codes.shape))
        values = torch.empty(shape, dtype=dtype, device=codes.device)
        codes = codes.reshape(*shape[:-1], -1)
        stacks = (one.reshape(-1, *one.shape[-2:]) for one in (codes, scales, values))
        for codes_RC, scales_PQ, values_RC in zip(*stacks, strict=True):
            self._decode_matrix(codes_RC, scales_PQ, values_RC)
        return values.transpose(-1, -2) if self.transposed else values

    def _decode_matrix(self, codes_RC: torch.Tensor, scales_PQ: torch.Tensor, values_RC: torch.Tensor) -> None:
        down, across = self.block
        columns = values_RC.shape[1]
        step = max(1, _PIECE // columns)
        for first in range(0, len(values_RC), step):
            piece = codes_RC[first : first + step]
            rows = torch.arange(first, first + len(piece), device=codes_RC.device) // down
            product = _unpacked(piece) if self.packed else piece.float()
            product *= scales_PQ[rows].repeat_interleave(across, 1)[:, :columns]
            values_RC[first : first + step] = product


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """float32 [R, C] of bytes [R, C / 2]."""
    pairs = _PAIRS.to(codes.device).index_select(0, codes.view(torch.uint8).flatten().int())
    return pairs.view(len(codes), -1)


@dataclass(frozen=True)
class Quantised:
    """A weight of a checkpoint that is stored in a `BlockFormat`.

    Args:
        block_format: that one.
        codes, scales: the names of its two tensors.
        shape: of the weight.
    """

    block_format: BlockFormat
    codes: str
    scales: str
    shape: tuple[int, ...]


MXFP4 = BlockFormat("U8", ("U8",), (1, 32), codes_end="_blocks", packed=True, transposed=True)
FP4 = BlockFormat("I8", ("F8_E8M0",), (1, 32), packed=True)


def block_formats(quantization: Mapping[str, Any] | None) -> tuple[BlockFormat, ...]:
    """What weights of a checkpoint with this `quantization_config` may be stored in; none if it has none or another."""
    method = quantization.get("quant_method") if quantization else None
    if method == "mxfp4":
        return (MXFP4,)
    if quantization and method == "fp8" and quantization.get("weight_block_size"):
        down, across = quantization["weight_block_size"]
        return (BlockFormat("F8_E4M3", _SCALE_DTYPES, (down, across)), FP4)
    return ()


def find_quantised(
    formats: tuple[BlockFormat, ...], dtypes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Quantised]:
    """The quantised weights among a checkpoint's tensors, by their plain names.

    Args:
        formats: that it may have.
        dtypes: safetensors' names of all tensors' dtypes.
        shapes: of all tensors, as stored.

    Raises:
        ValueError: codes have no scales, or scales of another shape.
    """
    quantised = {}
    for codes, dtype in dtypes.items():
        for each in formats:
            if dtype != each.codes_dtype or not codes.endswith(each.codes_end):
                continue
            weight = codes.removesuffix(each.codes_end)
            names = each.scale_names(weight)
            scales = next((name for name in names if dtypes.get(name) in each.scales_dtypes), None)
            if scales is None:
                raise UserError(f"{codes} is {dtype}, and has no scales {' or '.join(names)}: download it again")
            shape = each.matrix_shape(shapes[codes])
            blocks = tuple(math.ceil(size / block) for size, block in zip(shape[-2:], each.block, strict=False))
            if shapes[scales] != (*shape[:-2], *blocks):
                raise UserError(
                    f"{scales} has shape {list(shapes[scales])}, and {codes}, {list(shapes[codes])}, needs "
                    f"{[*shape[:-2], *blocks]} in blocks of {list(each.block)}: config.json is another checkpoint's"
                )
            if each.transposed:
                shape = (*shape[:-2], shape[-1], shape[-2])
            quantised[weight] = Quantised(each, codes, scales, shape)
    return quantised
