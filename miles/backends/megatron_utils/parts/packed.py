"""Where the packed sequences of a micro-batch begin, and what each token's attention sees.

Shapes: T tokens of this rank, S sequences (or runs) of a group, Q and K the longest run of queries and of keys in it,
R the rotated part of a head. A micro-batch is one row of T tokens. Only attention knows where sequences begin:
boundaries and positions travel to it in `PackedSequences`, Megatron's own argument for this purpose, so that everything
else sees a plain sequence.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from miles.backends.megatron_utils.parts.rope import Rope
from miles.training.packing import ranges, zigzag_spans


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of neighbouring queries that see the same keys, up to their own: int64 [runs] each.

    The last query of a run is its last key. Queries are counted in this rank's tokens, which the runs cover in order;
    keys in the natural order of all context-parallel ranks' tokens.
    """

    query_starts: np.ndarray
    query_lengths: np.ndarray
    key_starts: np.ndarray
    key_lengths: np.ndarray


@dataclass(frozen=True, eq=False)
class PaddedGroup:
    """Runs of like length, one a row, for a batched product on a CPU.

    Args:
        query_index_SQ, key_index_SK: int64, the token at each place (the first token of all where there is none).
        last_key_SQ: int64, the last place in the row's keys that each query sees.
        square: every run's queries are its keys, so that plain causal attention is right.
    """

    query_index_SQ: torch.Tensor
    key_index_SK: torch.Tensor
    last_key_SQ: torch.Tensor
    square: bool


@dataclass(eq=False)
class PackedSequences(PackedSeqParams):
    """Boundaries of the packed sequences of one micro-batch, and the rotary angles of its tokens.

    Under context parallelism a rank holds the two chunks of every sequence that `zigzag_spans` names, and the
    boundaries are those of the whole micro-batch.

    Args:
        cu_seqlens_q: int32 [S + 1], where each sequence starts; the last entry is the number of all tokens.
        position_ids_T: int64 [T], each token's position in its own sequence.
        ropes: the model's, by name.
        angles: of the tokens by rope, (cosines, sines, interleaved) as `rotate` takes them: float32 [T, 1, R].
        starts: `cu_seqlens_q` as numbers.
        cp_group: the context-parallel group; None where a rank holds whole sequences.
    """

    position_ids_T: torch.Tensor = field(kw_only=True)
    ropes: Mapping[str, Rope] = field(default_factory=dict)
    angles: dict[str, tuple[torch.Tensor, torch.Tensor, bool]] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    _made: dict[tuple, Any] = field(default_factory=dict)

    @property
    def cp_rank(self) -> int:
        """This rank's number in the context-parallel group."""
        return 0 if self.cp_group is None else self.cp_group.rank()

    @property
    def cp_size(self) -> int:
        """How many ranks share each sequence."""
        return 1 if self.cp_group is None else self.cp_group.size()

    @property
    def device(self) -> torch.device:
        """Where the micro-batch is."""
        return self.position_ids_T.device

    def runs(self, chunk: int | None) -> Runs:
        """What this rank's queries see; with `chunk` nothing beyond the chunk of so many tokens of their sequence."""
        return self.once(("runs", chunk), lambda: _runs(self.starts, chunk, self.cp_rank, self.cp_size))

    def padded_groups(self, chunk: int | None) -> tuple[list[PaddedGroup], torch.Tensor]:
        """The runs in padded layouts, and int64 [T]: each token's place in the flattened queries of all groups."""
        return self.once(("padded", chunk), lambda: _padded_groups(self.runs(chunk), self.natural_order()))

    def varlen_bounds(self, chunk: int | None) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """int32 starts of the runs' queries and of their keys laid end to end, and the longest run of either."""

        def make():
            runs = self.runs(chunk)
            bounds = [np.concatenate(([0], lengths.cumsum())) for lengths in (runs.query_lengths, runs.key_lengths)]
            starts = [torch.from_numpy(x.astype(np.int32)).to(self.device) for x in bounds]
            return *starts, int(runs.query_lengths.max()), int(runs.key_lengths.max())

        return self.once(("bounds", chunk), make)

    def run_keys(self, chunk: int | None) -> torch.Tensor:
        """int64: of the gathered tokens of all ranks, the keys of all runs laid end to end. For context parallelism.

        A key is in at most two runs, one of each of the rank's chunks of its sequence.
        """

        def make():
            runs = self.runs(chunk)
            order = self.natural_order()
            assert order is not None, "for context parallelism"
            return order[torch.from_numpy(ranges(runs.key_starts, runs.key_lengths)).to(self.device)]

        return self.once(("run keys", chunk), make)

    def natural_order(self) -> torch.Tensor | None:
        """int64 [all tokens]: where in the tokens gathered rank by rank each of the micro-batch is; None at size 1."""

        def make():
            by_rank = [_runs(self.starts, None, rank, self.cp_size) for rank in range(self.cp_size)]
            tokens = np.concatenate([_query_places(runs) for runs in by_rank])
            return torch.from_numpy(np.argsort(tokens)).to(self.device)

        return None if self.cp_size == 1 else self.once(("natural order",), make)

    def seen_keys(self, chunk: int | None, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and last key in natural order that each query sees, all between included: int32 [T] each."""

        def make():
            runs = self.runs(chunk)
            last = _query_places(runs)
            first = np.repeat(runs.key_starts, runs.query_lengths)
            if window is not None:
                first = np.maximum(first, last - window + 1)
            return tuple(torch.from_numpy(x.astype(np.int32)).to(self.device) for x in (first, last))

        return self.once(("seen", chunk, window), make)

    def once(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What `make` returns; for each `key` it is called once in this micro-batch, whatever the number of layers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def packed_sequences(
    cu_seqlens: torch.Tensor,
    position_ids_T: torch.Tensor,
    max_seqlen: int,
    ropes: Mapping[str, Rope],
    cp_group: dist.ProcessGroup | None = None,
) -> PackedSequences:
    """The boundaries and angles of a micro-batch.

    Args:
        cu_seqlens: int32 [S + 1], where each sequence starts; the last entry is the number of all tokens. On the CPU,
            or the host waits for the device.
        position_ids_T: int64 [T], each of this rank's tokens' position in its own sequence.
        max_seqlen: length of the longest sequence.
        ropes: the model's, by name.
        cp_group: the context-parallel group. Every sequence's length is then a multiple of twice its size, and this
            rank holds each sequence's `zigzag_spans`.
    """
    if cp_group is not None and cp_group.size() == 1:
        cp_group = None
    cu_seqlens_q = cu_seqlens.to(position_ids_T.device)
    packed = PackedSequences(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_q,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cp_group=cp_group,
        position_ids_T=position_ids_T,
        ropes=ropes,
        angles={name: (*rope.angles(position_ids_T), rope.interleaved) for name, rope in ropes.items()},
        starts=tuple(cu_seqlens.tolist()),
    )
    assert len(position_ids_T) * packed.cp_size == packed.starts[-1], (len(position_ids_T), packed.starts[-1])
    return packed


def _runs(starts: tuple[int, ...], chunk: int | None, cp_rank: int, cp_size: int) -> Runs:
    found = []
    for start, end in itertools.pairwise(starts):
        for first, last in zigzag_spans(end - start, cp_rank, cp_size):
            while first < last:
                begin, stop = (0, last) if chunk is None else (first // chunk * chunk, (first // chunk + 1) * chunk)
                stop = min(stop, last)
                found.append((stop - first, start + begin, stop - begin))
                first = stop
    query_lengths, key_starts, key_lengths = np.array(found, dtype=np.int64).T
    return Runs(query_lengths.cumsum() - query_lengths, query_lengths, key_starts, key_lengths)


def _query_places(runs: Runs) -> np.ndarray:
    """Each query's own place among the keys in natural order."""
    return ranges(runs.key_starts + runs.key_lengths - runs.query_lengths, runs.query_lengths)


def _padded_groups(runs: Runs, order: torch.Tensor | None) -> tuple[list[PaddedGroup], torch.Tensor]:
    """Group runs by length (powers of two), so that padding at most doubles the work, and lay each group out."""
    query_starts, query_lengths, key_starts, key_lengths = (
        torch.from_numpy(x) for x in (runs.query_starts, runs.query_lengths, runs.key_starts, runs.key_lengths)
    )
    powers = torch.ceil(torch.log2(key_lengths.double())).long()
    groups, first_place, place = [], torch.empty_like(query_starts), 0
    for power in powers.unique().tolist():
        members = (powers == power).nonzero().flatten()
        q_lengths, k_lengths = query_lengths[members, None], key_lengths[members, None]
        q_offsets, k_offsets = torch.arange(int(q_lengths.max())), torch.arange(int(k_lengths.max()))
        key_index_SK = torch.where(k_offsets < k_lengths, key_starts[members, None] + k_offsets, 0)
        groups.append(
            PaddedGroup(
                query_index_SQ=torch.where(q_offsets < q_lengths, query_starts[members, None] + q_offsets, 0),
                key_index_SK=key_index_SK if order is None else order[key_index_SK],
                # Padding queries see what the last one sees: a row that sees nothing would be NaN.
                last_key_SQ=torch.minimum(k_lengths - q_lengths + q_offsets, k_lengths - 1),
                square=torch.equal(q_lengths, k_lengths),
            )
        )
        first_place[members] = place + torch.arange(len(members)) * len(q_offsets)
        place += len(members) * len(q_offsets)
    return groups, torch.from_numpy(ranges(first_place.numpy(), runs.query_lengths))
