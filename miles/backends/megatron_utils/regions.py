"""One rank's weights, gradients and optimizer in flat buffers, each region's in device memory of its own.

A move of a region then copies exactly its bytes: no padding between tensors, no temporaries of a step in its pool.
"""

import torch

from miles.backends.megatron_utils.model import TrainState
from miles.backends.megatron_utils.torch_adam import fill_state, inner_optimizers
from miles.residency.memory import DeviceMemory, bytes_of, pack, span
from miles.residency.plan import Policy, Region

# The tags that the device memory knows the regions by.
TAGS = {Region.WEIGHTS: "param_buffer", Region.GRADS: "grad_buffer", Region.OPTIMIZER: "optimizer"}
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_regions(policy: Policy, state: TrainState, memory: DeviceMemory) -> dict[Region, list[torch.Tensor]]:
    """Move everything into its region. Gradients are away meanwhile, so that the peak is that of a training step."""
    ddp_buffers = [buffer for chunk in state.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    grads = [bytes_of(buffer.grad_data.untyped_storage()) for buffer in ddp_buffers]
    for grad in grads:
        memory.rehome(grad.untyped_storage(), TAGS[Region.GRADS], keep=False)
    memory.release(TAGS[Region.GRADS])

    weights = [bytes_of(buffer.param_data.untyped_storage()) for buffer in ddp_buffers if buffer.param_data is not None]
    for weight in weights:
        memory.rehome(weight.untyped_storage(), TAGS[Region.WEIGHTS], keep=True)
    parameters = [parameter for model in state.models for parameter in model.parameters()]
    loose = [parameter for parameter in parameters if all(span(weight, parameter) is None for weight in weights)]
    if loose:
        weights.append(pack(loose, memory, TAGS[Region.WEIGHTS]))

    regions = {Region.WEIGHTS: weights, Region.GRADS: grads, Region.OPTIMIZER: []}
    if not policy.stream_optimizer:
        regions[Region.OPTIMIZER] = _build_optimizer(state, memory, weights)
    memory.restore(TAGS[Region.GRADS])
    for grad in grads:
        grad.zero_()
    return regions


def _build_optimizer(state: TrainState, memory: DeviceMemory, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """One buffer for masters and one for each moment; a parameter that is its own master is a weight already."""
    tag, buffers = TAGS[Region.OPTIMIZER], []
    optimizers = inner_optimizers(state.optimizer)
    params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    masters = [p for p in params if all(span(weight, p) is None for weight in weights)]
    if masters:
        buffers.append(pack(masters, memory, tag))
    for moment in MOMENTS:
        for optimizer in optimizers:
            fill_state(optimizer, moment)
        states = [optimizer.state[p] for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]]
        buffers.append(pack([entry[moment] for entry in states], memory, tag))
    return buffers
