"""The critic's loss."""

from typing import NamedTuple

import torch


class ValueTerm(NamedTuple):
    """Of each token: its loss, with gradient, and whether the clip decided it (1 or 0)."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor


def value_loss(values_N: torch.Tensor, old_N: torch.Tensor, returns_N: torch.Tensor, value_clip: float) -> ValueTerm:
    """max((v - return)^2, (clip(v, old - value_clip, old + value_clip) - return)^2), without a factor of 1/2.

    Source: PPO's reference implementation (https://github.com/openai/baselines, ppo2); see also
    https://arxiv.org/abs/2005.12729, section 3.

    Args:
        values_N: values under the critic in training.
        old_N: values before the rollout's first step.
        returns_N: what the values should be.
        value_clip: how far a value may move from the old one before its gradient ends.
    """
    free_N = (values_N - returns_N).square()
    clipped_N = (torch.clamp(values_N, old_N - value_clip, old_N + value_clip) - returns_N).square()
    return ValueTerm(torch.maximum(free_N, clipped_N), (clipped_N > free_N).float())
