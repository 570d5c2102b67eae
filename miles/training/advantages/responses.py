"""The response tokens of many samples as flat columns, and how estimators see them: as their trainable tokens alone.

Shape suffixes: S samples, n response tokens, m trainable response tokens (m <= n), in the same order.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Responses:
    """Which response token belongs to which sample, and which of them are trained on.

    Args:
        offsets: int64 [S + 1], from 0 to n: sample s has the tokens offsets[s] .. offsets[s + 1] - 1.
        mask: bool [n], the trainable tokens. Between them may be others, such as what a tool wrote.
    """

    offsets: Tensor
    mask: Tensor

    def __post_init__(self):
        assert self.offsets.dtype == torch.int64 and self.mask.dtype == torch.bool, (self.offsets, self.mask)
        assert self.offsets[0] == 0 and self.offsets[-1] == len(self.mask), (self.offsets, self.mask.shape)
        assert (self.offsets.diff() >= 0).all(), self.offsets

    @cached_property
    def sample_m(self) -> Tensor:
        """The sample of each trainable token: int64 [m]."""
        return torch.repeat_interleave(torch.arange(len(self.offsets) - 1), self.offsets.diff())[self.mask]

    @cached_property
    def left_m(self) -> Tensor:
        """How many trainable tokens its sample has from each one on; 1 at the last: int64 [m]."""
        counts_S = torch.bincount(self.sample_m, minlength=len(self.offsets) - 1)
        return counts_S.cumsum(0)[self.sample_m] - torch.arange(len(self.sample_m))

    def select(self, x_n: Tensor) -> Tensor:
        """The values at trainable tokens, in float64: [n] to [m]. What stands elsewhere, NaN included, is not read."""
        assert x_n.shape == self.mask.shape, f"{tuple(x_n.shape)} values for {len(self.mask)} response tokens"
        return x_n[self.mask].double()

    def spread(self, x_S: Tensor) -> Tensor:
        """The value of its sample at each trainable token, in float64: [S] to [m]."""
        assert x_S.shape == (len(self.offsets) - 1,), f"{tuple(x_S.shape)} values for {len(self.offsets) - 1} samples"
        return x_S.double()[self.sample_m]

    def at_last(self, x_S: Tensor) -> Tensor:
        """The value of its sample at the last trainable token, 0 at the others, in float64: [S] to [m]."""
        return torch.where(self.left_m == 1, self.spread(x_S), 0.0)

    def following(self, x_m: Tensor) -> Tensor:
        """What stands at its sample's next trainable token, 0 after the last: [m] to [m]."""
        return torch.where(self.left_m == 1, 0.0, x_m.roll(-1))

    def place(self, x_m: Tensor) -> Tensor:
        """Values of trainable tokens where they belong, 0 at all others, in float32: [m] to [n]."""
        x_n = torch.zeros(len(self.mask))
        x_n[self.mask] = x_m.float()
        return x_n

    def discounted_sums(self, x_m: Tensor, discount: float) -> Tensor:
        """y_t = x_t + discount y_(t+1) over the trainable tokens of each sample: float64 [m] to [m].

        By doubling: after pass k, y_t is the sum over the next 2^k tokens. That is log2(longest sample) vector
        operations; only powers of `discount` <= 1 occur, so nothing overflows or cancels, however long the sample.
        """
        y_m, ahead_m, nothing = x_m.clone(), torch.empty_like(x_m), x_m.new_zeros(())
        step, factor = 1, discount
        longest = int(self.left_m.max()) if len(self.left_m) else 0
        while step < longest and factor > 0:
            # In one buffer for all passes: new memory for each would cost as much as the sums.
            ahead = torch.where(self.left_m[:-step] > step, y_m[step:], nothing, out=ahead_m[:-step])
            y_m[:-step].add_(ahead, alpha=factor)
            step, factor = 2 * step, factor * factor
        return y_m
