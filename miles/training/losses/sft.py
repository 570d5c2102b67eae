"""The supervised loss."""

import torch


def sft_loss(log_probs_N: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each token."""
    return -log_probs_N
