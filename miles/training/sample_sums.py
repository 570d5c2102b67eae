"""Sums over a sample's tokens, wherever they lie. N response tokens of this rank, S samples of the micro-batch."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from miles.training.packing import PackedBatch

# Takes a tensor, gives its sum over the context-parallel ranks; its backward pass sums the gradients over them too.
AllReduce = Callable[[torch.Tensor], torch.Tensor]


def sum_over(group: dist.ProcessGroup) -> AllReduce | None:
    """The `AllReduce` of a group, None for a group of one. Every rank must make the same calls, backward ones too."""
    if group.size() == 1:
        return None
    return lambda x: _SumOver.apply(x, group)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        # The loss is a sum over ranks, and each rank's part depends on the total.
        return _SumOver.apply(grad, ctx.group), None


class SampleSums:
    """Sums and means over the trainable tokens of each sample of a micro-batch, and back to its tokens.

    Sums are made in float64, so that they hardly depend on how tokens are split among ranks.

    Args:
        packed: the micro-batch, or this context-parallel rank's part of it.
        all_reduce: adds up over the context-parallel ranks; None where this rank has whole samples.
    """

    def __init__(self, packed: PackedBatch, all_reduce: AllReduce | None):
        self._mask_N, self._sample_N = packed.mask_N, packed.sample_N
        self._num_samples = len(packed.sample_columns["sample_indices"])
        self._all_reduce = all_reduce

    @functools.cached_property
    def count_S(self) -> torch.Tensor:
        """Trainable tokens of each sample: float64 [S]."""
        return self._sum(self._mask_N.double())

    def sum(self, x_N: torch.Tensor) -> torch.Tensor:
        """The sum of each sample's trainable tokens, [N] or [N, K] to float64 [S] or [S, K]; the others aren't read."""
        mask_N = self._mask_N if x_N.ndim == 1 else self._mask_N[:, None]
        return self._sum(torch.where(mask_N, x_N, 0.0).double())

    def mean(self, x_N: torch.Tensor) -> torch.Tensor:
        """Their mean, [N] to float64 [S]; 0 for a sample without trainable tokens."""
        return self.sum(x_N) / self.count_S.clamp(min=1)

    def spread(self, x_S: torch.Tensor) -> torch.Tensor:
        """Each token gets its sample's number, [S, ...] to float32 [N, ...]."""
        return x_S[self._sample_N].float()

    def _sum(self, x_N: torch.Tensor) -> torch.Tensor:
        total_S = x_N.new_zeros(self._num_samples, *x_N.shape[1:]).index_add(0, self._sample_N, x_N)
        return total_S if self._all_reduce is None else self._all_reduce(total_S)
