"""Estimates of the divergence from a reference model at sampled tokens."""

import torch

from miles.training.losses.numbers import MAX_LOG_RATIO, bounded_exp

MAX_LOW_VAR_KL = 10.0
KL_KINDS = ("k1", "k2", "k3", "low_var_kl")


def kl_estimate(log_probs_N: torch.Tensor, ref_N: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimates KL(model || reference) at each sampled token.

    With d = ref - log_probs: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d; low_var_kl is k3 held within +-10. In k3 and
    low_var_kl d is held within +-20. As a loss, k1 has a gradient of 0 on average, and k2 that of the KL.

    Source: Schulman (http://joschu.net/blog/kl-approx.html).

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
    # e^d - 1 would lose its digits where d is small, and of those k3 is a difference.
    k3_N = torch.expm1(d_N) - d_N
    return k3_N if kind == "k3" else k3_N.clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


def unbiased_kl(kl_N: torch.Tensor, log_ratio_N: torch.Tensor) -> torch.Tensor:
    """kl * exp(log_ratio), with the gradients of both: k1's and k3's mean gradient is then that of the KL itself.

    The samples were drawn from another model than the one in training; the ratio accounts for that, and for the sampled
    token's own dependence on the weights.

    Source: DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556, "Unbiased KL Estimate").

    Args:
        kl_N: a `kl_estimate`.
        log_ratio_N: log-probability under the model in training minus that under the one that wrote the tokens; held
            within +-20.
    """
    return bounded_exp(log_ratio_N) * kl_N
