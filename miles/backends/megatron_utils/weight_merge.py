"""Full tensors from shards: what the ranks of tensor and expert parallelism hold is gathered and merged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from miles.hf.entries import HEAD, Entry
from miles.hf.parallel import Group, ParallelInfo
from miles.weight_sync.source import Read, Write, part_shape

# Tensors of one gather call start at multiples of this many bytes, so that each can be viewed as its dtype.
ALIGNMENT = 16


@dataclass(frozen=True)
class HeldEntry:
    """An entry and the parameter of this rank that holds it.

    Args:
        with_head: its tensor is given under the name of the head too.
    """

    entry: Entry
    parameter: torch.Tensor
    with_head: bool = False

    @property
    def shape(self) -> torch.Size:
        """Of the parameter, or of one expert's part."""
        return part_shape(self.parameter, self.entry.expert)

    @property
    def nbytes(self) -> int:
        """As `shape`."""
        return self.shape.numel() * self.parameter.element_size()


class Merge:
    """One filling of a bucket, on a rank of its pipeline stage.

    Args:
        parallel: this rank's place.
        device: where the parameters are.
        read: gives their values.
        write: takes the full tensors.

    Attributes:
        failure: what could not be read first, None if all could.
    """

    def __init__(self, parallel: ParallelInfo, device: torch.device, read: Read, write: Write):
        self.parallel, self.device, self.read, self.write = parallel, device, read, write
        self.failure: Exception | None = None

    def run(self, held: Sequence[HeldEntry], limit: int) -> None:
        """Write all entries that this rank's tensor-parallel groups hold; `limit`: bytes of a bucket."""
        parallel = self.parallel
        dense: list[HeldEntry] = []
        experts: list[HeldEntry] = []
        for each in held:
            entry = each.entry
            size = parallel.etp_size if entry.is_expert else parallel.tp_size
            if entry.stacked:
                self._stacked(each)
            elif size == 1 or not entry.kind.sharded:
                self._put(each, [self._value(each)])
            else:
                (experts if entry.is_expert else dense).append(each)
        self._gather(dense, limit, parallel.tp_size, parallel.tp_group)
        self._gather(experts, limit, parallel.etp_size, parallel.etp_group)

    def _value(self, held: HeldEntry) -> torch.Tensor:
        entry, parameter = held.entry, held.parameter
        try:
            value = self.read(parameter, entry.expert)
        except Exception as error:
            error.add_note(f"{entry.megatron_name} could not be read")
            self.failure = self.failure or error
            return torch.empty(held.shape, dtype=parameter.dtype, device=self.device)
        assert (value.shape, value.dtype, value.device) == (held.shape, parameter.dtype, parameter.device), (
            f"{entry.megatron_name}: {tuple(value.shape)} {value.dtype} {value.device} was read"
        )
        return value

    def _put(self, held: HeldEntry, shards: Sequence[torch.Tensor]) -> None:
        for name, tensor in zip(held.entry.hf_names, held.entry.kind.merge(shards), strict=True):
            self.write(name, tensor)
            if held.with_head:
                self.write(HEAD, tensor)

    def _gather(self, held: list[HeldEntry], limit: int, size: int, group: Group) -> None:
        """Write entries that are cut over a group, as many in a call as its limit allows."""
        for batch in _batches(held, batch_limit(limit) // size):
            starts, end = [], 0
            for each in batch:
                starts.append(end)
                end += _aligned(each)
            shards = self._all_shards(batch, starts, end, size, group)
            for each, start in zip(batch, starts, strict=True):
                self._put(each, [_piece(shard, start, each) for shard in shards])
            del shards

    def _all_shards(self, batch: list[HeldEntry], starts: list[int], end: int, size: int, group: Group) -> torch.Tensor:
        """uint8 [size, end]: the batch's parameters of every rank of a group, each from its start on."""
        flat = torch.empty(end, dtype=torch.uint8, device=self.device)
        for each, start in zip(batch, starts, strict=True):
            _piece(flat, start, each).copy_(self._value(each))
        return _gathered(flat, size, group)

    def _stacked(self, held: HeldEntry) -> None:
        """Write an entry whose tensors hold all experts: those of this rank, of all ranks, then of all their shards."""
        entry, parallel = held.entry, self.parallel
        value = _gathered(self._value(held), parallel.ep_size, parallel.ep_group).flatten(0, 1)
        if entry.kind.sharded:
            self._put(held, list(_gathered(value, parallel.etp_size, parallel.etp_group)))
        else:
            self._put(held, [value])


def batch_limit(limit: int) -> int:
    """Bytes that one collective call gathers at most, unless a single tensor is larger; `limit`: bytes of a bucket."""
    return limit // 16


def _batches(held: list[HeldEntry], limit: int) -> Iterator[list[HeldEntry]]:
    """Runs of entries of at most `limit` bytes of this rank's shards together, or a single larger one."""
    batch: list[HeldEntry] = []
    filled = 0
    for each in held:
        nbytes = _aligned(each)
        if batch and filled + nbytes > limit:
            yield batch
            batch, filled = [], 0
        batch.append(each)
        filled += nbytes
    if batch:
        yield batch


def _aligned(held: HeldEntry) -> int:
    return -(-held.nbytes // ALIGNMENT) * ALIGNMENT


def _piece(flat: torch.Tensor, start: int, held: HeldEntry) -> torch.Tensor:
    """The bytes from `start` as a tensor of the shape and dtype of an entry."""
    return flat[start : start + held.nbytes].view(held.parameter.dtype).view(held.shape)


def _gathered(value: torch.Tensor, size: int, group: Group) -> torch.Tensor:
    """[size, *value.shape]: the value of every rank of a group."""
    if size == 1:
        return value[None]
    value = value.contiguous()
    result = value.new_empty(size, *value.shape)
    # As bytes: gloo does not gather every dtype.
    dist.all_gather_into_tensor(result.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8), group=group())
    return result
