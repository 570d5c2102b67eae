"""Losses of single tokens, and the one way to add them up. N is the number of response tokens in the micro-batch."""

from typing import NamedTuple

import torch

# exp(20) is about 5e8: far outside every clipping range, and finite in float32.
MAX_LOG_RATIO = 20.0
MAX_LOW_VAR_KL = 10.0
KL_KINDS = ("k1", "k2", "k3", "low_var_kl")


class PolicyLoss(NamedTuple):
    """The clipped loss of each token, whether the clip decided it (1 or 0), and old minus current log-probability."""

    loss_N: torch.Tensor
    clipfrac_N: torch.Tensor
    ppo_kl_N: torch.Tensor


def policy_loss(
    log_probs_N: torch.Tensor,
    old_N: torch.Tensor,
    adv_N: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped loss: max(-ratio A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) A), ratio = exp(log_probs - old).

    Sources: PPO (https://arxiv.org/abs/1707.06347, eq. 7); a higher upper bound, DAPO
    (https://arxiv.org/abs/2503.14476); dual clip, which bounds the loss by c |A| where A < 0
    (https://arxiv.org/abs/1912.09729, eq. 5).

    Args:
        log_probs_N: log-probabilities under the model in training.
        old_N: log-probabilities under the model that defines the ratio, without gradient.
        adv_N: advantages.
        eps_clip: how far the ratio may fall below 1.
        eps_clip_high: how far it may rise above 1.
        eps_clip_c: the dual clip's c > 1, or None for none.
    """
    assert eps_clip_c is None or eps_clip_c > 1
    log_ratio_N = log_probs_N - old_N
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_N = -ratio_N * adv_N
    clipped_N = -ratio_N.clamp(1 - eps_clip, 1 + eps_clip_high) * adv_N
    loss_N = torch.maximum(free_N, clipped_N)
    if eps_clip_c is not None:
        loss_N = torch.where(adv_N < 0, torch.minimum(loss_N, -eps_clip_c * adv_N), loss_N)
    return PolicyLoss(loss_N, (clipped_N > free_N).float(), -log_ratio_N)


def kl_estimate(log_probs_N: torch.Tensor, ref_N: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimates KL(model || reference) at each sampled token (http://joschu.net/blog/kl-approx.html).

    With d = ref - log_probs: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d; low_var_kl is k3 held within +-10. In k3 and
    low_var_kl d is held within +-20.

    Args:
        log_probs_N: log-probabilities under the model that wrote the tokens.
        ref_N: log-probabilities under the reference.
        kind: one of `KL_KINDS`.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"KL estimator {kind!r} is unknown; choose one of {', '.join(KL_KINDS)}")
    d_N = ref_N - log_probs_N
    if kind == "k1":
        return -d_N
    if kind == "k2":
        return d_N.square() / 2
    d_N = d_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3_N = d_N.exp() - 1 - d_N
    return k3_N if kind == "k3" else k3_N.clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


def sft_loss(log_probs_N: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each token."""
    return -log_probs_N


def weighted_sum(x_N: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    """Sum of weight * x over the tokens that weigh anything; what stands at the others, NaN included, is not read."""
    return (torch.where(weight_N > 0, x_N, 0.0) * weight_N).sum()
