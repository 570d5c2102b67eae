"""CISPO: the ratio is clipped as a weight, so that no token loses its gradient."""

import torch

from miles.training.losses.clip import PolicyTerm
from miles.training.losses.numbers import bounded_exp


def cispo_loss(
    log_probs_N: torch.Tensor,
    log_ratio_N: torch.Tensor,
    adv_N: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
) -> PolicyTerm:
    """-stop_gradient(clip(ratio, 1 - eps_clip, 1 + eps_clip_high)) A log_prob, ratio = exp(log_ratio).

    Its value says little; its gradient is that of REINFORCE, weighted. A token counts as clipped where its ratio is out
    of the range.

    Source: CISPO, MiniMax-M1 (https://arxiv.org/abs/2506.13585, eq. 4 and 5), which sets no lower bound (eps_clip near
    1) and averages over tokens (--calculate-per-token-loss).

    Args:
        log_probs_N: log-probabilities under the model in training.
        log_ratio_N: those minus the log-probabilities that define the ratio.
        adv_N: advantages.
        eps_clip, eps_clip_high: how far the ratio may fall below and rise above 1.
    """
    ratio_N = bounded_exp(log_ratio_N.detach())
    weight_N = ratio_N.clamp(1 - eps_clip, 1 + eps_clip_high)
    return PolicyTerm(-weight_N * adv_N * log_probs_N, (weight_N != ratio_N).float(), ratio_N)
