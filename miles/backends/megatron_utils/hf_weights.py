"""Hugging Face checkpoints into a Megatron model, whose parts are matched with the checkpoint's tensors."""

import logging
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.hf.checkpoint import DTYPES, CheckpointIndex, some_of
from miles.hf.entries import HEAD, Entry
from miles.hf.parallel import ParallelInfo
from miles.utils.errors import UserError

logger = logging.getLogger(__name__)


def check_names_and_shapes(
    index: CheckpointIndex, entries: list[Entry], family: Family, hf_config: PreTrainedConfig
) -> None:
    """Compare all of a model's entries with the checkpoint. A tied head may be listed or not.

    Args:
        index: the checkpoint.
        entries: of every pipeline stage.
        family: of the model.
        hf_config: its configuration.

    Raises:
        ValueError: names, shapes or kinds of numbers differ; it lists them.
    """
    wanted = {name: shape for entry in entries for name, shape in zip(entry.hf_names, entry.shapes, strict=True)}
    extra = {name for name in index.files if name not in wanted and not name.endswith(family.ignored_suffixes)}
    extra -= set(untrained_names(index, family, hf_config))
    if hf_config.tie_word_embeddings:
        extra.discard(HEAD)
    missing = [name for name in wanted if name not in index]
    shapes = [
        f"{name} {list(index.shapes[name])} in the checkpoint, {list(shape)} by config.json"
        for name, shape in wanted.items()
        if name in index and index.shapes[name] != tuple(shape)
    ]
    dtypes = [f"{name} {index.dtypes[name]}" for name in wanted if name in index and index.dtypes[name] not in DTYPES]
    faults = [
        f"{what}: {some_of(names)}"
        for what, names in (
            ("missing", missing),
            ("not of this model", sorted(extra)),
            ("other shapes", shapes),
            (f"dtypes other than {', '.join(DTYPES)}", dtypes),
        )
        if names
    ]
    if faults:
        raise UserError(f"the weights in {index.folder} do not fit its config.json; " + "; ".join(faults))


def untrained_names(index: CheckpointIndex, family: Family, hf_config: PreTrainedConfig) -> list[str]:
    """The checkpoint's weights that its model has no use for."""
    prefixes = family.ignored_prefixes(hf_config)
    return [name for name in index.files if name.startswith(prefixes)]


def rounded_names(index: CheckpointIndex, own: list[tuple[Entry, torch.Tensor]]) -> list[str]:
    """The weights of a half-precision checkpoint that it keeps in float32 and the model doesn't."""
    wide = [
        name
        for entry, parameter in own
        for name in entry.hf_names
        if index.dtypes[name] == "F32" and parameter.element_size() < torch.float32.itemsize
    ]
    return wide if any(dtype in ("F16", "BF16") for dtype in index.dtypes.values()) else []


def load_into(
    chunks: list[torch.nn.Module],
    family: Family,
    hf_config: PreTrainedConfig,
    folder: str | Path,
    parallel: ParallelInfo,
) -> int:
    """Fill this rank's part of the model from the checkpoint in `folder`; returns the number of parameters filled.

    Only the tensors of this rank's layers and experts are read, file by file, so that at most one file and one
    parameter's tensors are in memory; values are cast to the parameters' dtypes.

    Args:
        chunks: the pipeline stage's GPTModels, unwrapped.
        family: of the model.
        hf_config: its configuration.
        folder: of the checkpoint.
        parallel: this rank's place.

    Raises:
        ValueError: checkpoint and config.json differ in names or shapes, or the model has a parameter without a value,
            or a value has no parameter.
    """
    index = CheckpointIndex(folder)
    layers = range(hf_config.num_hidden_layers)
    whole = family.renamed(family.entries(hf_config, layers, True, True, parallel.ep_size), index.files)
    check_names_and_shapes(index, whole, family, hf_config)
    untrained = untrained_names(index, family, hf_config)
    if untrained:
        logger.info("not trained nor sent to engines, exported as they are: %s", some_of(untrained))
    own: list[tuple[Entry, torch.Tensor]] = []
    filled = 0
    for number, chunk in enumerate(chunks):
        targets = model_tensors(chunk)
        held = held_entries(chunk_entries(family, hf_config, parallel, index, parallel.pp_rank, number), parallel)
        check_parameters(targets, held)
        own += [(entry, entry_part(entry, targets[entry.megatron_name])) for entry in held]
        filled += len(targets)
    rounded = rounded_names(index, own)
    if rounded:
        logger.warning(
            "%d weights are float32 in a checkpoint of other types, and rounded to the model's type: %s",
            len(rounded),
            some_of(rounded),
        )
    place = {path: number for number, path in enumerate(dict.fromkeys(index.files.values()))}

    def last_file(entry: Entry) -> Path:
        return max((index.files[name] for name in entry.hf_names), key=place.__getitem__)

    for entry, target in sorted(own, key=lambda item: place[last_file(item[0])]):
        _fill(entry, target, index, parallel)
        index.close(keep=last_file(entry))
    index.close()
    return filled


@torch.no_grad()
def _fill(entry: Entry, target: torch.Tensor, index: CheckpointIndex, parallel: ParallelInfo) -> None:
    part = slice(None)
    if entry.stacked:
        part = slice(parallel.ep_rank * len(target), (parallel.ep_rank + 1) * len(target))
    values = [index.read(name, part, target.dtype, target.device) for name in entry.hf_names]
    rank, size = _place(entry, parallel)
    own = entry.kind.split(values, rank, size)
    if own.shape != target.shape:
        raise UserError(
            f"{entry.megatron_name} has shape {list(target.shape)} in the model and {list(own.shape)} from "
            f"{', '.join(entry.hf_names)} at {'expert ' if entry.is_expert else ''}tensor parallel size {size}"
        )
    target.copy_(own)


def _place(entry: Entry, parallel: ParallelInfo) -> tuple[int, int]:
    """The rank and size of the tensor parallelism that cuts an entry."""
    return (parallel.etp_rank, parallel.etp_size) if entry.is_expert else (parallel.tp_rank, parallel.tp_size)


def chunk_entries(
    family: Family,
    hf_config: PreTrainedConfig,
    parallel: ParallelInfo,
    index: CheckpointIndex,
    stage: int,
    chunk: int,
) -> list[Entry]:
    """What a chunk of a pipeline stage's model has, the experts of all ranks included, by the checkpoint's names."""
    layers = parallel.chunk_layers[stage][chunk]
    first, last = (stage, chunk) == (0, 0), (stage + 1, chunk + 1) == (parallel.pp_size, len(parallel.chunk_layers[0]))
    return family.renamed(family.entries(hf_config, layers, first, last, parallel.ep_size), index.files)


def held_entries(entries: list[Entry], parallel: ParallelInfo) -> list[Entry]:
    """The entries of which this rank has something."""
    return [entry for entry in entries if entry.ep_rank in (None, parallel.ep_rank)]


@torch.no_grad()
def entry_part(entry: Entry, parameter: torch.Tensor) -> torch.Tensor:
    """What of the parameter the entry is about: all of it, or a view of one expert's part."""
    return parameter if entry.expert is None else parameter[entry.expert]


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a stage's model, by name (Megatron's _extra_state is no weight)."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
    }


def check_parameters(targets: dict[str, torch.Tensor], entries: list[Entry]) -> None:
    """Check that each parameter of the stage, or each expert's part of it, has exactly one entry.

    Raises:
        ValueError: it lists the names that differ.
    """
    named: dict[str, list[int | None]] = {}
    for entry in entries:
        named.setdefault(entry.megatron_name, []).append(entry.expert)
    for name in named.keys() & targets.keys():
        parts = [None] if named[name][0] is None else list(range(len(targets[name])))
        assert named[name] == parts, f"the entries name {name} twice, or not all of its experts"
    without_value, without_parameter = sorted(targets.keys() - named.keys()), sorted(named.keys() - targets.keys())
    if without_value or without_parameter:
        raise UserError(
            "the Megatron model and its family's entries differ: parameters without a value: "
            f"{some_of(without_value)}; values without a parameter: {some_of(without_parameter)}"
        )
