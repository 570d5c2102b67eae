"""Context parallelism without Transformer Engine: every rank keeps its queries and gathers all keys and values.

Llama 3 trains long contexts this way (Grattafiori et al. 2024, 3.3.2, "all-gather based"). Which tokens a rank holds is
`miles.training.packing.zigzag_spans`.
"""

import torch
import torch.distributed as dist


def gather_tokens(x_T: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tokens [T, ...] of all ranks of `group`, one rank's after another's; a token's gradients are summed."""
    return _GatherTokens.apply(x_T, group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_T, group):
        ctx.group = group
        gathered = x_T.new_empty(group.size() * len(x_T), *x_T.shape[1:])
        dist.all_gather_into_tensor(gathered, x_T.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None
