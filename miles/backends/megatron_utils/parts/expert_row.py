"""An expert's second projection with a bias (gpt-oss)."""

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear


class ExpertRow(RowParallelLinear):
    """Megatron's, as an expert with a bias can use it.

    Megatron's MLP adds the bias in place, which autograd refuses on the view that the projection returns. And the bias
    is marked sequence-parallel, so its gradient would be summed over tensor-parallel ranks a second time, after the sum
    over the ranks that hold the same expert.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, bias = super().forward(hidden_states)
        return output.clone(), bias
