"""Whose probability ratio a correction looks at: a token's, its sequence's, or the sequence's geometric mean."""

import torch

from miles.config.off_policy import Level
from miles.training.sample_sums import SampleSums


def log_ratio_at(level: Level, log_ratio_N: torch.Tensor, sums: SampleSums) -> torch.Tensor:
    """Log-ratios of tokens, or of each token's sequence: the sum over its trainable tokens, or their mean; [N] to [N].

    exp of the sum is the ratio of the sequence's probabilities, without bias and of a variance that grows with length;
    exp of the mean is its geometric mean, comparable between lengths.
    """
    if level == "token":
        return log_ratio_N
    return sums.spread(sums.sum(log_ratio_N) if level == "sequence" else sums.mean(log_ratio_N))
