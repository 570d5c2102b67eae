"""Logits of the response tokens only, in float32: what the loss needs, and no more.

Shapes: T tokens of a micro-batch (T / tp under sequence parallelism), N response tokens, H hidden size, V the columns
of this rank.
"""

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from miles.training.packing import PackedBatch


def response_logits(
    *, hidden_states, output_layer, output_weight: torch.Tensor | None, context: PackedBatch, **_
) -> torch.Tensor:
    """GPTModel's `output_processor`: float32 logits [N, V] at the rows that predict a response token.

    Prompt and padding rows would be most of the largest tensor of a step. Logits rounded to bfloat16 are off by a few
    hundredths, which is most of the gap between the trainer's log-probabilities and an engine's.
    """
    weight = output_layer.weight if output_weight is None else output_weight
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=output_layer.tp_group)
    else:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=output_layer.tp_group)
    return _Float32Logits.apply(hidden_states[:, 0].index_select(0, context.logit_index_N), weight)


class _Float32Logits(torch.autograd.Function):
    """x [N, H] times weight [V, H] transposed, accumulated and returned in float32 whatever the inputs' type."""

    @staticmethod
    def forward(ctx, x_NH, weight_VH):
        ctx.save_for_backward(x_NH, weight_VH)
        if x_NH.is_cuda and x_NH.dtype != torch.float32:
            return torch.mm(x_NH, weight_VH.t(), out_dtype=torch.float32)
        return x_NH.float() @ weight_VH.float().t()

    @staticmethod
    def backward(ctx, grad_NV):
        x_NH, weight_VH = ctx.saved_tensors
        grad_NV = grad_NV.to(x_NH.dtype)
        return grad_NV @ weight_VH, grad_NV.t() @ x_NH
