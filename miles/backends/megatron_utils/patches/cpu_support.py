"""The few lines that let megatron-core 0.19.2 run on a CPU with gloo, without Transformer Engine or Apex.

Megatron has no device-agnostic path: it asks `torch.cuda` for the current device and stream, writes `device="cuda"` as
a literal in four modules, and chooses optimizer groups by the type name "torch.cuda.FloatTensor". `install()` answers
these questions for a CPU; nothing else of Megatron changes. The version is checked, since every line depends on its
source. Delete this once Megatron runs on a device that is not `torch.cuda`'s.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import types
from collections.abc import Iterator
from unittest import mock

import torch

from miles.utils.errors import UserError

MEGATRON_VERSION = "0.19.2"
_MODULES_WITH_CUDA_LITERALS = ("pipeline_parallel.schedules", "optimizer.optimizer", "optimizer.clip_grads", "utils")
_FACTORIES = ("tensor", "zeros", "ones", "empty")


class _Stream:
    """A stream that is always done: work on a CPU is synchronous."""

    def wait_stream(self, *_) -> None: ...

    def wait_event(self, *_) -> None: ...

    def synchronize(self) -> None: ...


class _TorchOnCPU(types.ModuleType):
    """`torch` as seen by one Megatron module: tensor factories turn `device="cuda"` into the CPU."""

    def __getattr__(self, name: str):
        attribute = getattr(torch, name)
        if name not in _FACTORIES:
            return attribute

        @functools.wraps(attribute)
        def factory(*args, **kwargs):
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return attribute(*args, **kwargs)

        return factory


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Within it, `tensor.type()` names CUDA types: the optimizer sorts parameters by them.

    Wrap it around building the optimizer and around its `step()`; on a GPU it changes nothing.
    """
    original = torch.Tensor.type

    def type_name(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not self.is_cuda:
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    with mock.patch.object(torch.Tensor, "type", type_name):
        yield


def _splits_as_numbers(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """The dispatcher's copy of counts to the host: they are there, but the exchange wants them as numbers."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name)
            if torch.is_tensor(splits):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


def _uneven_collectives(mappings: types.ModuleType) -> None:
    """Gathers and reductions over ranks with unequal parts (experts cut by tensor parallelism), which gloo lacks."""
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def uneven_gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes, longest = list(output_split_sizes), max(output_split_sizes)
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = gather(padded, group).split(longest)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def uneven_reduce_scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].clone()

    vars(mappings).update(_gather_along_first_dim=uneven_gather, _reduce_scatter_along_first_dim=uneven_reduce_scatter)


@functools.cache
def install() -> None:
    """Make this process able to build and train Megatron models on the CPU; before one is built, as often as wanted."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    # Not megatron.core.__version__, which appends the commit of whatever git checkout the program runs in.
    installed = importlib.metadata.version("megatron-core")
    if installed != MEGATRON_VERSION:
        raise UserError(
            f"megatron-core {installed} is installed, but its CPU support was written for "
            f"{MEGATRON_VERSION}: pip install megatron-core=={MEGATRON_VERSION}"
        )
    assert not torch.cuda.is_available(), "CPU support must not be installed where a GPU is visible"
    vars(torch.cuda).update(
        current_device=lambda: torch.device("cpu"),
        current_stream=lambda *_: _Stream(),
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
    )
    # Tied embeddings with pipeline stages call weight.data.cuda().
    setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)  # noqa: B010 -- a method, which mypy lets nobody assign
    # Checkpoints and recomputation save the device's generator: on a CPU it is the default one.
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _Stream()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_as_numbers
    _uneven_collectives(mappings)
    for module in _MODULES_WITH_CUDA_LITERALS:
        vars(importlib.import_module(f"megatron.core.{module}"))["torch"] = _TorchOnCPU("torch")
