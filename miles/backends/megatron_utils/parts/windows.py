"""Which keys the queries of packed sequences see in DeepSeek-V4: a window of tokens, and compressed entries.

Every `ratio` tokens of a sequence, counted from its own start, make one entry; what is left over at its end makes none.
Entries of all sequences are laid end to end, in the natural order of tokens. Shapes: T this rank's queries, W entries,
M tokens of an entry.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from miles.backends.megatron_utils.parts.packed import PackedSequences
from miles.training.packing import ranges


@dataclass(frozen=True, eq=False)
class Spans:
    """For each query the keys that it may see: from `low` on, below `high`.

    Args:
        low_N, high_N: int64 [T] on the host, from which blocks are cut.
        low_T, high_T: the same on the device, from which masks are made.
    """

    low_N: np.ndarray
    high_N: np.ndarray
    low_T: torch.Tensor
    high_T: torch.Tensor

    @property
    def longest(self) -> int:
        """Most keys that one query sees."""
        return int((self.high_N - self.low_N).max())

    def part(self, queries: slice) -> "Spans":
        """Those of some queries."""
        return Spans(self.low_N[queries], self.high_N[queries], self.low_T[queries], self.high_T[queries])

    def blocks(self, size: int) -> Iterator[tuple[slice, int, int]]:
        """Blocks of at most `size` queries, and the keys that each sees together: low, high."""
        for first in range(0, len(self.low_N), size):
            block = slice(first, min(first + size, len(self.low_N)))
            yield block, *self.of(block)

    def of(self, block: slice) -> tuple[int, int]:
        """The keys that the queries of a block see together: low, high."""
        low = int(self.low_N[block].min())
        return low, max(low, int(self.high_N[block].max()))

    def mask(self, block: slice, low: int, high: int) -> torch.Tensor:
        """bool [Q, high - low]: which of the keys from `low` to `high` each query of a block sees."""
        places = torch.arange(low, high, device=self.low_T.device)
        return (places >= self.low_T[block, None]) & (places < self.high_T[block, None])


@dataclass(frozen=True, eq=False)
class Windows:
    """The entries of a micro-batch at one ratio.

    Args:
        tokens_WM: int64, the tokens of each entry, in natural order.
        position_W: int64, the first one's position in its own sequence: where the entry is rotated to.
        follows_W: bool, whether the entry before it is of the same sequence.
        seen: the entries that each query sees: those that end at it or before it.
    """

    tokens_WM: torch.Tensor
    position_W: torch.Tensor
    follows_W: torch.Tensor
    seen: Spans


def token_spans(packed: PackedSequences, window: int) -> Spans:
    """The tokens that each query sees: itself and those before it, `window` together."""

    def make() -> Spans:
        starts, queries, sequence_Q = _queries(packed)
        return _spans(packed, np.maximum(starts[sequence_Q], queries - window + 1), queries + 1)

    return packed.once(("token spans", window), make)


def windows_of(packed: PackedSequences, ratio: int) -> Windows:
    """The entries of a micro-batch; made once, whatever the number of layers."""
    return packed.once(("windows", ratio), lambda: _windows(packed, ratio))


def _windows(packed: PackedSequences, ratio: int) -> Windows:
    starts, queries, sequence_Q = _queries(packed)
    counts = np.diff(starts) // ratio
    before = counts.cumsum() - counts
    position = ranges(np.zeros_like(counts), counts) * ratio
    tokens = (np.repeat(starts[:-1], counts) + position)[:, None] + np.arange(ratio)
    low = before[sequence_Q]
    high = low + (queries - starts[sequence_Q] + 1) // ratio
    tokens_WM, position_W = (torch.from_numpy(x).to(packed.device) for x in (tokens, position))
    return Windows(tokens_WM, position_W, position_W > 0, _spans(packed, low, high))


def _queries(packed: PackedSequences) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where sequences start; each query's place in natural order; and the sequence that it is of."""
    starts, runs = np.array(packed.starts, dtype=np.int64), packed.runs(None)
    queries = ranges(runs.key_starts + runs.key_lengths - runs.query_lengths, runs.query_lengths)
    return starts, queries, np.searchsorted(starts, queries, side="right") - 1


def _spans(packed: PackedSequences, low: np.ndarray, high: np.ndarray) -> Spans:
    return Spans(low, high, *(torch.from_numpy(x).to(packed.device) for x in (low, high)))
