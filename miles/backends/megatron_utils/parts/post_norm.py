"""Sandwich norms: the output of attention and MLP is normalised before it is added to the residual stream."""

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear

from miles.backends.megatron_utils.parts.norms import PlusOneNorm, RMSNorm


class RowParallelPostNorm(RowParallelLinear):
    """A layer's last projection, then a norm of its output summed over tensor-parallel ranks (GLM-4).

    Megatron's layer has no place for such a norm. Its weight is named `post_layernorm.weight` within the projection.
    """

    norm: type[torch.nn.Module] = RMSNorm

    def __init__(self, input_size: int, output_size: int, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = self.norm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[T, B, this rank's inputs] -> [T, B, outputs], T cut under sequence parallelism."""
        output, bias = super().forward(input_)
        assert bias is None, "a bias would be added after the norm"
        return self.post_layernorm(output), None


class RowParallelPostPlusOneNorm(RowParallelPostNorm):
    """The same with Gemma's norm."""

    norm = PlusOneNorm
