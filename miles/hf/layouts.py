"""How a Megatron parameter is laid out: from full Hugging Face tensors to one tensor-parallel rank's tensor, and back.

`split(tensors, tp_rank, tp_size)` takes the full Hugging Face tensors and returns what the rank holds; `merge(shards)`
takes what every rank of the tensor-parallel group holds, in rank order, and returns the full Hugging Face tensors. Both
keep every bit. The results may be views of their inputs. `sharded` says whether ranks hold different parts.

Shape letters: V vocabulary, O output rows, I input columns, G key/value groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from miles.hf.vocab import vocab_shard
from miles.utils.errors import UserError

Tensors = Sequence[torch.Tensor]


class Layout(Protocol):
    """What every layout kind offers."""

    sharded: bool

    def __hash__(self) -> int: ...

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor: ...

    def merge(self, shards: Tensors) -> list[torch.Tensor]: ...


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor."""

    sharded = False

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        (tensor,) = tensors
        return tensor

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Column:
    """Output rows (dimension 0) are cut evenly."""

    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        (weight_OI,) = tensors
        return _part(weight_OI, 0, tp_rank, tp_size)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        return [_join(shards, 0)]


@dataclass(frozen=True)
class Row:
    """Input columns (dimension 1) are cut evenly."""

    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        (weight_OI,) = tensors
        return _part(weight_OI, 1, tp_rank, tp_size)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        return [_join(shards, 1)]


@dataclass(frozen=True)
class Vocab:
    """Like Column, on a table of `vocab_size` rows that is padded with zero rows to a multiple of the ranks."""

    vocab_size: int
    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        (weight_VH,) = tensors
        return vocab_shard(weight_VH, tp_rank, tp_size)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        return [_join(shards, 0)[: self.vocab_size]]


@dataclass(frozen=True)
class Qkv:
    """Query, key and value in one tensor (weight or bias): for each key/value group its query heads, key and value.

    Args:
        groups: key/value heads of the model.
        queries: query heads of one group.
        head_dim: rows of one head.
    """

    groups: int
    queries: int
    head_dim: int
    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        heads = (self.queries, 1, 1)
        grouped = [t.reshape(self.groups, n * self.head_dim, *t.shape[1:]) for t, n in zip(tensors, heads, strict=True)]
        return torch.cat([_part(g, 0, tp_rank, tp_size) for g in grouped], dim=1).flatten(0, 1)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        fused = _join(shards, 0)
        fused_G = fused.reshape(self.groups, (self.queries + 2) * self.head_dim, *fused.shape[1:])
        parts = fused_G.split([self.queries * self.head_dim, self.head_dim, self.head_dim], dim=1)
        return [part.flatten(0, 1) for part in parts]


@dataclass(frozen=True)
class GatedQkv:
    """As `Qkv`, with a gate for each query.

    Hugging Face stores a head's query, then its gate; Megatron has a group's query heads, then as many gates, its key
    and its value.
    """

    groups: int
    queries: int
    head_dim: int
    sharded = True

    @property
    def _fused(self) -> Qkv:
        return Qkv(self.groups, 2 * self.queries, self.head_dim)

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        query_OI, key_OI, value_OI = tensors
        heads = query_OI.reshape(self.groups, self.queries, 2, self.head_dim, *query_OI.shape[1:])
        return self._fused.split((heads.transpose(1, 2).flatten(0, 3), key_OI, value_OI), tp_rank, tp_size)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        query_OI, key_OI, value_OI = self._fused.merge(shards)
        heads = query_OI.reshape(self.groups, 2, self.queries, self.head_dim, *query_OI.shape[1:])
        return [heads.transpose(1, 2).flatten(0, 3), key_OI, value_OI]


@dataclass(frozen=True)
class Gated:
    """Gate and up projection in one tensor: a rank holds its gate rows, then its up rows."""

    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        gate_OI, up_OI = tensors
        return torch.cat([_part(gate_OI, 0, tp_rank, tp_size), _part(up_OI, 0, tp_rank, tp_size)])

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [_join([gate for gate, _ in halves], 0), _join([up for _, up in halves], 0)]


@dataclass(frozen=True)
class Sections:
    """Sections of rows, each cut evenly: a rank holds its part of one section after another.

    Args:
        sizes: for each Hugging Face tensor, the rows of its sections.
        groups: a tensor consists of as many groups of such sections, and a rank holds those of its groups.
    """

    sizes: tuple[tuple[int, ...], ...]
    groups: int = 1
    sharded = True

    def split(self, tensors: Tensors, tp_rank: int, tp_size: int) -> torch.Tensor:
        found = []
        for tensor, sizes in zip(tensors, self.sizes, strict=True):
            grouped = tensor.reshape(self.groups, sum(sizes), *tensor.shape[1:])
            found += [_part(section.flatten(0, 1), 0, tp_rank, tp_size) for section in grouped.split(sizes, dim=1)]
        return torch.cat(found)

    def merge(self, shards: Tensors) -> list[torch.Tensor]:
        rows = [self.groups * size // len(shards) for sizes in self.sizes for size in sizes]
        sections = iter([_join(parts, 0) for parts in zip(*(shard.split(rows) for shard in shards), strict=True)])
        found = []
        for sizes in self.sizes:
            grouped = [next(sections).unflatten(0, (self.groups, size)) for size in sizes]
            found.append(torch.cat(grouped, dim=1).flatten(0, 1))
        return found


def _part(tensor: torch.Tensor, dim: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    size = tensor.shape[dim]
    if size % tp_size:
        raise UserError(
            f"dimension {dim} of a tensor of shape {tuple(tensor.shape)} cannot be cut into "
            f"tensor_model_parallel_size={tp_size} equal parts: choose a divisor of {size}"
        )
    return tensor.narrow(dim, tp_rank * (size // tp_size), size // tp_size)


def _join(shards: Tensors, dim: int) -> torch.Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)
