"""Whitening: advantages of a whole rollout with mean 0 and variance 1."""

from collections.abc import Callable

import torch
from torch import Tensor


def whiten(advantages: Tensor, mask: Tensor, all_reduce: Callable[[Tensor], None]) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the unmasked tokens of all ranks; 0 at masked ones.

    REINFORCE++ (https://arxiv.org/abs/2501.03262) calls it global advantage normalisation. The variance is the
    population's, and is summed around the mean, in float64, so that a large mean costs no digits.

    Args:
        advantages: [n], of this rank; what stands at masked tokens is not read.
        mask: bool [n], the trainable tokens.
        all_reduce: sums a float64 tensor in place over the ranks that share the rollout out between them. It is called
            twice on every rank, also where all tokens are masked.

    Returns:
        float32 [n].
    """
    values_m = advantages[mask].double()
    count_and_sum = torch.stack([torch.tensor(len(values_m), dtype=torch.float64), values_m.sum()])
    all_reduce(count_and_sum)
    count, total = count_and_sum
    values_m = values_m - total / count
    squares = values_m.square().sum()
    all_reduce(squares)
    result = torch.zeros(len(mask))
    result[mask] = (values_m / (squares / count + 1e-8).sqrt()).float()
    return result
