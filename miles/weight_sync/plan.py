"""What a sync sends and in which buckets: from names, shapes and dtypes alone, so that every rank finds the same."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.hf_weights import check_names_and_shapes, chunk_entries
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.entries import EMBEDDING_END, HEAD, Entry
from miles.hf.layouts import Layout
from miles.hf.parallel import ParallelInfo
from miles.weight_sync.live_bytes import LiveBytes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlannedEntry:
    """An entry, and the pipeline stage and the chunk of that stage's model that it belongs to."""

    stage: int
    chunk: int
    entry: Entry


@dataclass(frozen=True)
class GatherPlan:
    """What will be gathered, the same on every rank.

    entries: in the order of the model's layers. shapes: {Hugging Face name: full shape}, in that order.
    tied_head_listed: the checkpoint lists the head of a tied model, so the embedding is given under that name too.
    """

    entries: list[PlannedEntry]
    shapes: dict[str, Shape]
    tied_head_listed: bool


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a bucket: its bytes start at `start`. owner: the expert-parallel rank that has it."""

    name: str
    shape: Shape
    dtype: torch.dtype
    start: int
    owner: int | None

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Bucket:
    """Entries of one pipeline stage that are gathered, and sent, in one piece of memory.

    slots: {name: slot}, in the order of memory. nbytes: of all of them. capacity: bytes to allocate, the same for all
    but large ones, so that freed memory fits the next. scratch: bytes that gathering takes for a moment beside it.
    """

    stage: int
    entries: tuple[PlannedEntry, ...]
    slots: dict[str, Slot]
    nbytes: int
    capacity: int
    scratch: int


def make_plan(
    family: Family, hf_config: PreTrainedConfig, parallel: ParallelInfo, index: CheckpointIndex
) -> GatherPlan:
    """The plan for a model, compared with the checkpoint that it came from; `parallel` of any rank.

    Raises ValueError where their names or shapes differ, or there are none: an engine accepts an unknown name without a
    word and dies of a wrong shape.
    """
    entries = [
        PlannedEntry(stage, chunk, entry)
        for chunk in range(len(parallel.chunk_layers[0]))
        for stage in range(parallel.pp_size)
        for entry in chunk_entries(family, hf_config, parallel, stage, chunk)
        if not entry.load_only
    ]
    if not entries:
        raise ValueError(f"{type(family).__name__} lists no weights at all: there is nothing to send")
    check_names_and_shapes(index, [planned.entry for planned in entries], family, hf_config)
    tied_head_listed = hf_config.tie_word_embeddings and HEAD in index
    shapes = {}
    for planned in entries:
        for name, shape in zip(planned.entry.hf_names, planned.entry.shapes, strict=True):
            assert name not in shapes, f"two entries give {name}"
            shapes[name] = tuple(shape)
            if name.endswith(EMBEDDING_END) and tied_head_listed:
                shapes[HEAD] = tuple(shape)
    return GatherPlan(entries, shapes, tied_head_listed)


def plan_buckets(
    plan: GatherPlan, dtypes: Sequence[torch.dtype], limit: int, tp_size: int, etp_size: int, copies: bool
) -> list[Bucket]:
    """Cut the plan's entries into buckets, of which two, and the scratch for gathering one, take at most 2 x `limit`.

    dtypes: one an entry. copies: parameters are read as copies, not in place. A single entry, or entries of one atomic
    key with all between them, may take more: they make up a bucket of their own. Within a bucket wider dtypes come
    first, and the order is kept otherwise.
    """
    sized = []
    for planned, dtype in zip(plan.entries, dtypes, strict=True):
        tensors = list(zip(planned.entry.hf_names, planned.entry.shapes, strict=True))
        tensors += [(HEAD, shape) for name, shape in tensors if name.endswith(EMBEDDING_END) and plan.tied_head_listed]
        size = etp_size if planned.entry.is_expert else tp_size
        sized.append(_Sized(planned, dtype, tensors, _scratch(planned.entry, dtype, size, limit, copies)))
    scratch = max((one.scratch for one in sized if one.nbytes + one.scratch <= limit), default=0)
    most = limit - (scratch + 1) // 2
    groups: list[list[_Sized]] = []
    filled = most  # of the last group: nothing fits into none
    for unit in _units(sized):
        nbytes = sum(one.nbytes for one in unit)
        small = nbytes <= most and max(one.scratch for one in unit) <= scratch
        if groups and small and filled + nbytes <= most and groups[-1][0].planned.stage == unit[0].planned.stage:
            groups[-1] += unit
            filled += nbytes
        else:
            groups.append(unit)
            # Nothing joins a large one.
            filled = nbytes if small else most + 1
    sizes = [sum(one.nbytes for one in group) for group in groups]
    capacity = max((nbytes for nbytes in sizes if nbytes <= most), default=0)
    return [_bucket(group, max(capacity, nbytes)) for group, nbytes in zip(groups, sizes, strict=True)]


class _Sized:
    """An entry with its tensors' names and shapes, the bytes of all of them, and those that gathering it takes."""

    def __init__(self, planned: PlannedEntry, dtype: torch.dtype, tensors: list[tuple[str, Shape]], scratch: int):
        self.planned, self.dtype, self.tensors, self.scratch = planned, dtype, tensors, scratch
        self.nbytes = sum(tensor_bytes(shape, dtype) for _, shape in tensors)


def _units(sized: list[_Sized]) -> Iterator[list[_Sized]]:
    """The smallest runs of entries that keep every atomic key whole."""
    keys = [one.planned.entry.atomic for one in sized]
    last = {key: number for number, key in enumerate(keys) if key is not None}
    unit: list[_Sized] = []
    end = -1
    for number, (one, key) in enumerate(zip(sized, keys, strict=True)):
        end = max(end, last.get(key, number))
        unit.append(one)
        if number == end:
            places = {(each.planned.stage, each.planned.chunk) for each in unit}
            assert len(places) == 1, f"{unit[0].tensors[0][0]}: entries of an atomic key lie on several stages"
            yield unit
            unit = []


def _bucket(sized: list[_Sized], capacity: int) -> Bucket:
    slots, start = {}, 0
    for one in sorted(sized, key=lambda one: -one.dtype.itemsize):
        for name, shape in one.tensors:
            slots[name] = Slot(name, tuple(shape), one.dtype, start, one.planned.entry.ep_rank)
            start += slots[name].nbytes
    entries = tuple(one.planned for one in sized)
    return Bucket(entries[0].stage, entries, slots, start, capacity, max(one.scratch for one in sized))


def batch_limit(limit: int) -> int:
    """Bytes that one collective call gathers at most, unless a single tensor is larger; `limit`: bytes of a bucket."""
    return limit // 16


def _scratch(entry: Entry, dtype: torch.dtype, size: int, limit: int, copies: bool) -> int:
    """Most bytes that gathering an entry over `size` ranks takes beside the bucket that it is written into.

    A batch's own shards and all ranks' shards; of the entry that is in work, the shard that was read, with `copies`,
    and the full tensors where the layout copies them.
    """
    full = sum(tensor_bytes(shape, dtype) for shape in entry.shapes)
    merging = _merge_bytes(entry.kind, entry.shapes, size, dtype)
    if entry.stacked:
        return 3 * full + merging
    if size == 1 or not entry.kind.sharded:
        return full * copies + merging
    # Shards are a row longer where a vocabulary is padded.
    batch = max(full + full // max(entry.shapes[0][0], 1) * size, batch_limit(limit))
    return batch + max(batch // size + full // size * copies, merging)


@functools.lru_cache(maxsize=4096)
def _merge_bytes(kind: Layout, shapes: tuple[Shape, ...], size: int, dtype: torch.dtype) -> int:
    """Most bytes that `kind.merge` has at a time, beside its arguments; none where it gives views of them."""
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    ranks = range(size if kind.sharded else 1)
    shards = [torch.empty_like(kind.split(tensors, rank, size)) for rank in ranks]
    with LiveBytes() as live:
        kind.merge(shards)
    return live.peak


def tensor_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize
