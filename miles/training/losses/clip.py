"""PPO's clipped loss, clip-higher and dual clip."""

from typing import NamedTuple

import torch

from miles.training.losses.numbers import bounded_exp


class PolicyTerm(NamedTuple):
    """Of each token: its loss, with gradient; whether the clip decided it (1 or 0); its probability ratio."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor
    ratio_N: torch.Tensor


def clip_loss(
    log_ratio_N: torch.Tensor, adv_N: torch.Tensor, *, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None
) -> PolicyTerm:
    """max(-ratio A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) A), ratio = exp(log_ratio).

    With the dual clip, where A < 0: min(that, -eps_clip_c A).

    Sources: PPO (https://arxiv.org/abs/1707.06347, eq. 7); a higher upper bound, DAPO
    (https://arxiv.org/abs/2503.14476, eq. 10); dual clip (https://arxiv.org/abs/1912.09729, eq. 5).

    Args:
        log_ratio_N: log-probability under the model in training minus that under the one that defines the ratio.
        adv_N: advantages.
        eps_clip: how far the ratio may fall below 1.
        eps_clip_high: how far it may rise above 1.
        eps_clip_c: the dual clip's c > 1, or None for none.
    """
    assert eps_clip_c is None or eps_clip_c > 1
    ratio_N = bounded_exp(log_ratio_N)
    free_N = -ratio_N * adv_N
    clipped_N = -ratio_N.clamp(1 - eps_clip, 1 + eps_clip_high) * adv_N
    loss_N = torch.maximum(free_N, clipped_N)
    if eps_clip_c is not None:
        loss_N = torch.where(adv_N < 0, torch.minimum(loss_N, -eps_clip_c * adv_N), loss_N)
    return PolicyTerm(loss_N, (clipped_N > free_N).float(), ratio_N)
