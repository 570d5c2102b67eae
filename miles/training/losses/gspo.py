"""GSPO: one probability ratio a sequence."""

import torch

from miles.training.sample_sums import SampleSums


def sequence_log_ratio(log_ratio_N: torch.Tensor, sums: SampleSums) -> torch.Tensor:
    """Every token's log-ratio becomes the mean over its sequence's trainable tokens; so does its gradient.

    s = (p(y) / p_old(y))^(1 / |y|) takes the place of the token's ratio in the clipped loss. Its range is much
    narrower: the paper clips to 1 - 3e-4 and 1 + 4e-4.

    Source: GSPO (https://arxiv.org/abs/2507.18071, eq. 5 and 7).

    Args:
        log_ratio_N: current minus old log-probability of each token.
        sums: of the micro-batch; the mean is over all context-parallel ranks.
    """
    return sums.spread(sums.mean(log_ratio_N))
