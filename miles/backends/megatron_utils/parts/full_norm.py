"""Norms of queries and of keys over all heads together (MiniMax-M2).

Shapes: T tokens, N this rank's heads, D head size.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)


class FullQNorm(torch.nn.Module):
    """Root mean square normalisation (Zhang & Sennrich 2019, eq. 4) of the whole query projection.

    The mean runs over the heads of all tensor-parallel ranks. Each rank holds the whole weight and uses the part of its
    own heads: Megatron sums the gradients of what is called q_layernorm and k_layernorm over these ranks, so every rank
    gets the whole gradient, and checkpoints and the gradient's norm count the weight once.
    """

    heads = "num_attention_heads"

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        assert config.qk_layernorm, "gradients would not be summed over the tensor-parallel ranks"
        self.eps, self.size = eps, getattr(config, self.heads) * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.size, dtype=config.params_dtype))

    def forward(self, x_T1ND: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        wide = x_T1ND.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        # Every rank divides its heads by the sum, so the sum's gradient is summed as well.
        squares = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(squares, group=group), group=group
        )
        own_ND = self.weight.chunk(group.size())[group.rank()].view(x_T1ND.shape[-2:])
        return (wide * torch.rsqrt(squares / self.size + self.eps)).to(x_T1ND.dtype) * own_ND


class FullKNorm(FullQNorm):
    """The same of the whole key projection."""

    heads = "num_query_groups"
