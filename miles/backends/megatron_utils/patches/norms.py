"""Norm and clipping of gradients in a few kernels.

Without Transformer Engine and Apex megatron-core 0.19.2 goes through the gradients in a loop that waits for the GPU
after each; with them it returns the norm as a tensor of its own kind. Delete this once its loop does not wait.
"""

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_applier


def install() -> None:
    """Replace Megatron's functions, any number of times."""
    clip_grads.multi_tensor_applier = local_multi_tensor_applier
    clip_grads.l2_norm_impl = _foreach_norm
    clip_grads.multi_tensor_scale_impl = _foreach_scale
    clip_grads.multi_tensor_scale_tensor_impl = None


def _foreach_norm(_chunk_size, _overflow, tensor_lists, _per_tensor) -> tuple[torch.Tensor, None]:
    """Norm of all tensors together, [1]."""
    return torch.nn.utils.get_total_norm(tensor_lists[0], foreach=True)[None], None


def _foreach_scale(_chunk_size, _overflow, tensor_lists, scale: float) -> None:
    """Clipping, in place."""
    sources, targets = tensor_lists
    assert all(source.data_ptr() == target.data_ptr() for source, target in zip(sources, targets, strict=True))
    torch._foreach_mul_(targets, scale)
