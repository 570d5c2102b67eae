"""Normalisation layers that Megatron's local specification can use under sequence parallelism."""

import torch
import torch.nn.functional as F

from miles.backends.megatron_utils.parts.marks import mark
from miles.backends.megatron_utils.parts.rms_norm import rms_norm


class RMSNorm(torch.nn.Module):
    """Root mean square normalisation (Zhang & Sennrich 2019, eq. 4); allows sequence parallelism in a local spec."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class PlusOneNorm(torch.nn.Module):
    """RMSNorm times one plus the weight, in float32 (Gemma, Qwen3-Next); the weight is as Hugging Face stores it."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
