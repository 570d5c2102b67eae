"""Off-policy sequence masking."""

import torch

from miles.training.sample_sums import SampleSums


def off_policy_sequences(
    log_ratio_N: torch.Tensor, adv_N: torch.Tensor, delta: float, sums: SampleSums
) -> torch.Tensor:
    """Which tokens to leave out: A < 0, and the sequence's mean of log p_old - log p is above delta; bool [N].

    Source: DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556, "Off-Policy Sequence Masking"). Its p_old is the engine's,
    which --use-rollout-logprobs gives; otherwise it is the trainer's before the update.

    Args:
        log_ratio_N: current minus old log-probability, without gradient. Mind the sign: the mean is of its negative.
        adv_N: advantages.
        delta: the bound, in nats a token.
        sums: of the micro-batch; the mean is over the sequence's trainable tokens.
    """
    return (adv_N < 0) & (sums.spread(sums.mean(-log_ratio_N)) > delta)
