"""Layouts of a layer's experts that a checkpoint holds in one tensor: gpt-oss, Llama 4 and Qwen3.5.

`split` takes the tensors of the experts that an expert-parallel rank holds and gives [E, ...], one tensor an expert,
cut by expert tensor parallelism; `merge` takes [E, ...] of all experts from every rank of that. See layouts.py.

Shape letters: E experts, H hidden size, F an expert's inner size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from miles.hf.layouts import Row

Tensors = Sequence[torch.Tensor]
# Cuts dimension 1 evenly, which is F here.
_INNER = Row()


@dataclass(frozen=True)
class FusedGateUp:
    """Gate and up projections [E, H, 2F], or their biases [E, 2F], to one tensor an expert as `Gated` has it.

    interleaved: gate and up alternate along the last dimension (gpt-oss); otherwise gate comes first (Llama 4).
    """

    interleaved: bool
    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        (fused,) = tensors
        rows = fused.transpose(1, -1)
        halves = (rows[:, 0::2], rows[:, 1::2]) if self.interleaved else rows.chunk(2, dim=1)
        return torch.cat([_INNER.split((half,), tp_rank, tp_size) for half in halves], dim=1)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        gates, ups = zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
        halves = [*_INNER.merge(gates), *_INNER.merge(ups)]
        rows = torch.stack(halves, dim=2).flatten(1, 2) if self.interleaved else torch.cat(halves, dim=1)
        return [rows.transpose(1, -1)]


@dataclass(frozen=True)
class FusedDown:
    """Down projections [E, F, H] to one tensor [H, F] an expert."""

    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        return _INNER.split(tensors, tp_rank, tp_size).transpose(1, 2)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        return _INNER.merge([shard_EHF.transpose(1, 2) for shard_EHF in shards])


@dataclass(frozen=True)
class StackedGateUp:
    """Gate and up projections of experts, [E, 2F, H], gate first; a rank holds its gate rows, then its up rows."""

    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        (joined_EOH,) = tensors
        return torch.cat([_INNER.split((half,), tp_rank, tp_size) for half in joined_EOH.chunk(2, dim=1)], dim=1)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        halves = zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
        return [torch.cat([_INNER.merge(half)[0] for half in halves], dim=1)]


@dataclass(frozen=True)
class StackedDown:
    """Down projections of experts, [E, H, F], F cut evenly."""

    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        (down_EHF,) = tensors
        return _INNER.split((down_EHF.transpose(1, 2),), tp_rank, tp_size).transpose(1, 2)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        (down_EFH,) = _INNER.merge([shard_EHF.transpose(1, 2) for shard_EHF in shards])
        return [down_EFH.transpose(1, 2)]
