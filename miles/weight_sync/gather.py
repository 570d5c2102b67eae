"""Full Hugging Face tensors from a model that is cut over tensor-parallel ranks and pipeline stages."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.hf.base import EMBEDDING, HEAD, Entry, Family
from miles.backends.megatron_utils.hf.checkpoint_io import (
    CheckpointIndex,
    check_names_and_shapes,
    check_parameters,
    model_tensors,
)

NamedTensor = tuple[str, torch.Tensor]
# From a parameter of this rank to a tensor of its shape and dtype with its current values, on its device: a fresh one,
# or the parameter's own memory. It is not written to.
Read = Callable[[torch.Tensor], torch.Tensor]


def live(parameter: torch.Tensor) -> torch.Tensor:
    """The `Read` of a model whose parameters are in memory."""
    return parameter.detach()


@dataclass(frozen=True)
class ParallelInfo:
    """A rank's place in the grid of one model copy.

    tp_group and pp_group: give the process groups whose rank order is that of tp_rank and pp_rank. They are asked at
    each use (never where the size is 1): a trainer destroys its groups to sleep and has new ones afterwards.
    stage_layers: the global layer numbers of every pipeline stage, in stage order.
    """

    tp_rank: int
    tp_size: int
    tp_group: Callable[[], dist.ProcessGroup]
    pp_rank: int
    pp_size: int
    pp_group: Callable[[], dist.ProcessGroup]
    stage_layers: list[range]


@dataclass(frozen=True)
class GatherPlan:
    """What will be gathered, the same on every rank.

    entries: (pipeline stage, entry), in the order of gathering. shapes: {Hugging Face name: full shape}, in that order.
    tied_head_listed: the checkpoint lists the head of a tied model, so the embedding is given under that name too.
    """

    entries: list[tuple[int, Entry]]
    shapes: dict[str, tuple[int, ...]]
    tied_head_listed: bool


def make_plan(
    family: Family, hf_config: PreTrainedConfig, stage_layers: list[range], index: CheckpointIndex
) -> GatherPlan:
    """The plan for a model, compared with the checkpoint that it came from.

    Raises ValueError where their names or shapes differ: an engine accepts an unknown name without a word and dies of a
    wrong shape.
    """
    last = len(stage_layers) - 1
    entries = [
        (stage, entry)
        for stage, layers in enumerate(stage_layers)
        for entry in family.entries(hf_config, layers, stage == 0, stage == last)
        if not entry.load_only
    ]
    check_names_and_shapes(index, [entry for _, entry in entries], family, hf_config.tie_word_embeddings)
    tied_head_listed = hf_config.tie_word_embeddings and HEAD in index
    shapes = {}
    for _, entry in entries:
        for name, shape in zip(entry.hf_names, entry.shapes, strict=True):
            assert name not in shapes, f"two entries give {name}"
            shapes[name] = tuple(shape)
            if name == EMBEDDING and tied_head_listed:
                shapes[HEAD] = tuple(shape)
    return GatherPlan(entries, shapes, tied_head_listed)


def hf_tensors(
    model: torch.nn.Module,
    family: Family,
    hf_config: PreTrainedConfig,
    parallel: ParallelInfo,
    index: CheckpointIndex,
    read: Read,
) -> Iterator[NamedTensor]:
    """Check everything, then return an iterator over every (name, full tensor) of the model.

    All ranks of the grid iterate in lockstep and each gets every tensor, on the model's device and in its parameters'
    dtype. A tensor may be a view of a parameter: do not write to it. A tied head is not given, unless the checkpoint
    lists it. model: the stage's GPTModel, unwrapped. read: gives the values of one of its parameters (`live`, or, while
    the memory behind them is away, a copy); of a parameter itself only name, shape, dtype and device are used. What it
    gave is dropped once the next tensor is asked for.
    Raises ValueError before anything is sent where the model, its family and the checkpoint differ.
    """
    plan = make_plan(family, hf_config, parallel.stage_layers, index)
    stage, layers = parallel.pp_rank, parallel.stage_layers[parallel.pp_rank]
    own = family.entries(hf_config, layers, stage == 0, stage == parallel.pp_size - 1)
    parameters = model_tensors(model)
    check_parameters(parameters, own)
    return _gather(parameters, plan, parallel, read)


def _gather(
    parameters: dict[str, torch.Tensor], plan: GatherPlan, parallel: ParallelInfo, read: Read
) -> Iterator[NamedTensor]:
    for stage, entry in plan.entries:
        tensors = _full_tensors(parameters, stage, entry, parallel, read)
        # Taken out one by one: a tensor that has been sent must not live on until the next is there.
        for name in entry.hf_names:
            tensor = tensors.pop(0)
            assert tensor.shape == plan.shapes[name], f"{name}: {tuple(tensor.shape)}, planned {plan.shapes[name]}"
            yield name, tensor
            if name == EMBEDDING and plan.tied_head_listed:
                yield HEAD, tensor
            del tensor


def _full_tensors(
    parameters: dict[str, torch.Tensor], stage: int, entry: Entry, parallel: ParallelInfo, read: Read
) -> list[torch.Tensor]:
    """The full tensors of an entry of pipeline stage `stage`, on every rank."""
    example = next(iter(parameters.values()))
    if stage == parallel.pp_rank:
        parameter = parameters[entry.megatron_name]
        assert parameter.dtype == example.dtype, f"{entry.megatron_name} is {parameter.dtype}"
        full = entry.kind.merge(_shards(parameter, entry, parallel, read))
    else:
        full = [torch.empty(shape, dtype=example.dtype, device=example.device) for shape in entry.shapes]
    if parallel.pp_size > 1:
        full = [tensor.contiguous() for tensor in full]
        for tensor in full:
            dist.broadcast(tensor, group=parallel.pp_group(), group_src=stage)
    return full


def _shards(parameter: torch.Tensor, entry: Entry, parallel: ParallelInfo, read: Read) -> list[torch.Tensor]:
    own = read(parameter)
    assert (own.shape, own.dtype, own.device) == (parameter.shape, parameter.dtype, parameter.device), (
        f"{entry.megatron_name}: {tuple(own.shape)} {own.dtype} {own.device} was read"
    )
    if parallel.tp_size == 1 or not entry.kind.sharded:
        return [own]
    own = own.contiguous()
    shards = [torch.empty_like(own) for _ in range(parallel.tp_size)]
    dist.all_gather(shards, own, group=parallel.tp_group())
    return shards
