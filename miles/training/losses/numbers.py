"""The arithmetic that all losses share. N response tokens of a micro-batch."""

import torch

# exp(20) is about 5e8: far outside every clipping range, and finite in float32.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio) with log_ratio held within +-20; where it is held, the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def weighted_sum(x_N: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    """Sum of weight * x over the tokens that weigh anything; what stands at the others, NaN included, is not read."""
    return (torch.where(weight_N > 0, x_N, 0.0) * weight_N).sum()
