"""In which buckets a sync sends its tensors: from names, shapes and dtypes alone, so that every rank finds the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from miles.weight_sync.format import EngineFormat
from miles.weight_sync.live_bytes import LiveBytes
from miles.weight_sync.source import FullTensor, SourcePart


@dataclass(frozen=True)
class Slot(FullTensor):
    """The place in a bucket of one tensor that engines take.

    Args:
        start: where its bytes begin.
        owner: the only rank among those that share out experts that has it, see `SourcePart`.
    """

    start: int
    owner: int | None


@dataclass(frozen=True)
class Bucket:
    """Parts of one pipeline stage that are gathered, and sent, in one piece of memory.

    Args:
        stage: the pipeline stage.
        parts: of the source.
        slots: {name: slot}, in the order of memory.
        nbytes: of all slots.
        capacity: bytes to allocate, the same for all but large ones, so that freed memory fits the next.
        scratch: bytes that gathering takes for a moment beside it.
    """

    stage: int
    parts: tuple[SourcePart, ...]
    slots: dict[str, Slot]
    nbytes: int
    capacity: int
    scratch: int


def plan_buckets(parts: Sequence[SourcePart], engine_format: EngineFormat, limit: int) -> list[Bucket]:
    """Cut the parts into buckets, of which two, and the scratch for gathering one, take at most 2 x `limit` bytes.

    A single part, or parts of one atomic key with all between them, may take more: they make up a bucket of their own.
    Within a bucket wider dtypes come first, and the order is kept otherwise.
    """
    sized = [_Sized(part, engine_format) for part in parts]
    names = [tensor.name for one in sized for tensor in one.tensors]
    assert len(set(names)) == len(names), "two tensors of the source give the same one for engines"
    scratch = max((one.scratch for one in sized if one.nbytes + one.scratch <= limit), default=0)
    most = limit - (scratch + 1) // 2
    groups: list[list[_Sized]] = []
    filled = most  # of the last group: nothing fits into none
    for unit in _units(sized):
        nbytes = sum(one.nbytes for one in unit)
        small = nbytes <= most and max(one.scratch for one in unit) <= scratch
        if groups and small and filled + nbytes <= most and groups[-1][0].part.stage == unit[0].part.stage:
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
    """A part, the tensors that engines are sent for it, their bytes, and those that making them takes."""

    def __init__(self, part: SourcePart, engine_format: EngineFormat):
        self.part = part
        self.tensors: list[FullTensor] = []
        encoding = 0
        for tensor in part.tensors:
            unfilled = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            with LiveBytes() as live:
                encoded = engine_format.encode(tensor.name, unfilled)
            encoding = max(encoding, live.peak)
            self.tensors += [FullTensor(name, tuple(value.shape), value.dtype) for name, value in encoded.items()]
        self.scratch = part.scratch + encoding
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)


def _units(sized: list[_Sized]) -> Iterator[list[_Sized]]:
    """The smallest runs of parts that keep every atomic key whole."""
    keys = [one.part.atomic for one in sized]
    last = {key: number for number, key in enumerate(keys) if key is not None}
    unit: list[_Sized] = []
    end = -1
    for number, (one, key) in enumerate(zip(sized, keys, strict=True)):
        end = max(end, number if key is None else last[key])
        unit.append(one)
        if number == end:
            assert len({each.part.stage for each in unit}) == 1, (
                f"{unit[0].tensors[0].name}: parts of an atomic key lie on several stages"
            )
            yield unit
            unit = []


def _bucket(sized: list[_Sized], capacity: int) -> Bucket:
    tensors = [(tensor, one.part.owner) for one in sized for tensor in one.tensors]
    slots, start = {}, 0
    for tensor, owner in sorted(tensors, key=lambda each: -each[0].dtype.itemsize):
        slots[tensor.name] = Slot(tensor.name, tensor.shape, tensor.dtype, start, owner)
        start += tensor.nbytes
    parts = tuple(one.part for one in sized)
    return Bucket(parts[0].stage, parts, slots, start, capacity, max(one.scratch for one in sized))
