"""The model's weights, rebuilt from the optimizer's fp32 masters (--rematerialize-param-from-master-weight)."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from miles.backends.megatron_utils.torch_adam import megatron_optimizers
from miles.utils.errors import UserError
from miles.weight_sync.source import part_shape

SHOWN = 8


class MasterWeights:
    """Gives a bf16 model's weights, bit for bit, from the masters that Megatron's distributed optimizer keeps in fp32.

    Each data-parallel rank holds the master of a range of each parameter; the range may be empty. `read` and `rebuild`
    bring the ranges together: all data-parallel ranks call them in the same order, while their groups exist. A `read`
    with one data-parallel rank needs no group.

    Args:
        chunks: the wrapped model that `optimizer` trains.
        optimizer: Megatron's, with the masters.
        contents: from a master (a flat fp32 tensor, the optimizer's own object) to its current values, on any device:
            not written to.

    Raises:
        ValueError: parameters have no master, which it names: those that are not bf16, are frozen, or belong to an
            optimizer of another kind.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        contents: Callable[[torch.Tensor], torch.Tensor],
    ):
        self._chunks, self._contents = chunks, contents
        self._optimizers = _distributed_optimizers(optimizer)
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self._optimizer_of: dict[torch.Tensor, DistributedOptimizer] = {}
        for part in self._optimizers:
            for buffer in part.buffers:
                if buffer.param_dtype == torch.bfloat16:
                    self._optimizer_of |= dict.fromkeys(buffer.params, part)
            for parameters, masters in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
                self._masters |= zip(parameters, masters, strict=True)
        without = [
            name
            for chunk in chunks
            for name, parameter in chunk.module.named_parameters()
            if parameter not in self._optimizer_of
        ]
        if without:
            rest = f" and {len(without) - SHOWN} more" if len(without) > SHOWN else ""
            raise UserError(
                "--rematerialize-param-from-master-weight needs bf16 parameters that are all trained with "
                f"--use-distributed-optimizer, but {len(without)} have no fp32 master to be rebuilt from: "
                f"{', '.join(without[:SHOWN])}{rest}; leave it out"
            )

    @torch.no_grad()
    def read(self, parameter: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """The values of a parameter of the model, or of one expert's part of it: a fresh tensor on its device.

        The parameter's own memory is not touched. Takes, besides the result, an fp32 copy of this rank's range of it.
        """
        optimizer, shape = self._optimizer_of[parameter], part_shape(parameter, expert)
        values = torch.zeros(shape.numel(), dtype=parameter.dtype, device=parameter.device)
        if parameter in self._masters:
            own, first = optimizer._get_model_param_range_map(parameter)["param"], (expert or 0) * shape.numel()
            start, end = max(own.start, first), min(own.end, first + shape.numel())
            if start < end:
                master = self._contents(self._masters[parameter])[start - own.start : end - own.start]
                # Moved first: a host copies faster than it converts.
                values[start - first : end - first] = master.to(parameter.device)
        # The group is asked for only where it is used: a sleep destroys it, and a new one is set afterwards.
        if optimizer.buffers[0].data_parallel_world_size > 1:
            # As bytes, of which all but one rank's are zero: a sum of bf16 numbers would turn -0.0 into 0.0.
            dist.all_reduce(values.view(torch.uint8), group=optimizer.data_parallel_group)
        return values.view(shape)

    @torch.no_grad()
    def rebuild(self) -> None:
        """Fill all parameters of the model, which are in memory again, from the masters, which are in memory too."""
        # What an optimizer step does after it has updated the masters.
        for optimizer in self._optimizers:
            optimizer._copy_main_params_to_model_params()
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)


def _distributed_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    parts = megatron_optimizers(optimizer)
    return [part for part in parts if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer]
