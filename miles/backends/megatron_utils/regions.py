"""One rank's weights, gradients and optimizer in flat buffers, each region's in device memory of its own.

A move of a region then copies exactly its bytes: no padding between tensors, no temporaries of a step in its pool.
"""

from collections.abc import Iterator

import torch

from miles.backends.megatron_utils.model import TrainState
from miles.backends.megatron_utils.torch_adam import fill_state, inner_optimizers
from miles.backends.trainer.protocol import TAGS
from miles.residency.memory import DeviceMemory, bytes_of, pack, span
from miles.residency.plan import Region

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_regions(state: TrainState, memory: DeviceMemory, stream_optimizer: bool) -> dict[Region, list[torch.Tensor]]:
    """Move everything into its region. Gradients are away meanwhile, so that the peak is that of a training step.

    Args:
        state: the model and optimizer of this rank.
        memory: the device memory to hold the regions.
        stream_optimizer: the optimizer's state is never in memory: it gets no region.
    """
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
    if not stream_optimizer:
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


def lasting_tensors(state: TrainState, stream_optimizer: bool) -> dict[str, torch.Tensor]:
    """Every tensor that must survive a sleep, by a name for messages; arguments as for `build_regions`."""
    tensors: dict[str, torch.Tensor] = {}
    for number, model in enumerate(state.models):
        tensors |= {f"chunk {number} {name}": parameter for name, parameter in model.named_parameters()}
        tensors |= {f"chunk {number} buffer {name}": buffer for name, buffer in _all_buffers(model)}
    for number, optimizer in enumerate([] if stream_optimizer else inner_optimizers(state.optimizer)):
        for index, master in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            tensors[f"optimizer {number} master {index}"] = master
            for name, value in optimizer.state[master].items():
                tensors[f"optimizer {number} {name} {index}"] = value
    return tensors


def _all_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers and other tensors that modules hold, also those that no state dict lists (rotary frequencies)."""
    for name, part in module.named_modules():
        for key, value in {**vars(part), **part._buffers}.items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value


def drop_quantized_workspaces(chunks: list[torch.nn.Module]) -> int:
    """Drop the FP8 copies of weights that Transformer Engine keeps, and makes again when needed; returns how many."""
    dropped = 0
    for part in (part for chunk in chunks for part in chunk.modules()):
        workspaces = vars(part).get("_fp8_workspaces")
        if workspaces:
            dropped += len(workspaces)
            workspaces.clear()
    return dropped
