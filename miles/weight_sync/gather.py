"""Full Hugging Face tensors from a model that is cut over tensor-, expert- and pipeline-parallel ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.hf_weights import check_parameters, chunk_entries, held_entries, model_tensors
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.entries import EMBEDDING_END, HEAD, Entry
from miles.hf.parallel import Group, ParallelInfo
from miles.weight_sync.plan import Bucket, PlannedEntry, batch_limit, make_plan, plan_buckets, tensor_bytes

# From a parameter of this rank to a tensor of its shape and dtype with its current values, on its device: a fresh one,
# or the parameter's own memory. It is not written to.
Read = Callable[[torch.Tensor], torch.Tensor]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Tensors of one gather call start at multiples of this many bytes, so that each can be viewed as its dtype.
ALIGNMENT = 16


def live(parameter: torch.Tensor) -> torch.Tensor:
    """The `Read` of a model whose parameters are in memory."""
    return parameter.detach()


class Gatherer:
    """Fills buckets with the full tensors of a model, in lockstep on all ranks of its grid.

    chunks: this stage's GPTModels, unwrapped; only names, shapes, dtypes and devices of their parameters are used, the
    values come from a `Read`. index: the checkpoint that the model came from. limit: bytes of a bucket (see
    `plan_buckets`). copies: the `Read` may give copies; False promises that it gives the parameters' own memory.
    Raises ValueError where the model, its family and the checkpoint differ.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        family: Family,
        hf_config: PreTrainedConfig,
        parallel: ParallelInfo,
        index: CheckpointIndex,
        limit: int,
        copies: bool,
    ):
        self.parallel, self.limit, self.copies = parallel, limit, copies
        self.plan = make_plan(family, hf_config, parallel, index)
        # Of every entry that this rank has something of: one parameter, or one of each of its experts.
        self.own: dict[PlannedEntry, list[torch.Tensor]] = {}
        for number, chunk in enumerate(chunks):
            parameters = model_tensors(chunk)
            held = held_entries(chunk_entries(family, hf_config, parallel, parallel.pp_rank, number), parallel)
            check_parameters(
                parameters, [replace(entry, megatron_name=name) for entry, names in held for name in names]
            )
            for entry, names in held:
                self.own[PlannedEntry(parallel.pp_rank, number, entry)] = [parameters[name] for name in names]
        self.device = next(iter(self.own.values()))[0].device

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The buckets of a sync. The first use is a collective call: only an owner knows the dtype of an entry."""
        codes = torch.zeros(len(self.plan.entries), dtype=torch.int32)
        for number, planned in enumerate(self.plan.entries):
            for parameter in self.own.get(planned, ()):
                codes[number] = 1 + DTYPES.index(parameter.dtype)
        codes = codes.to(self.device)
        for size, group in ((self.parallel.ep_size, self.parallel.ep_group), self._pipeline()):
            if size > 1:
                dist.all_reduce(codes, dist.ReduceOp.MAX, group=group())
        assert codes.min() > 0, "no rank holds an entry"
        dtypes = [DTYPES[code - 1] for code in codes.tolist()]
        return plan_buckets(self.plan, dtypes, self.limit, self.parallel.tp_size, self.parallel.etp_size, self.copies)

    def _pipeline(self) -> tuple[int, Group]:
        return self.parallel.pp_size, self.parallel.pp_group

    def fill(self, bucket: Bucket, flat: torch.Tensor, read: Read, everywhere: bool) -> Exception | None:
        """Write the bucket's tensors into `flat`, uint8 [bucket.nbytes]; see `views`.

        With `everywhere` all ranks call it and have the bytes afterwards, else those of the bucket's pipeline stage.
        The collective calls are made to their end even where this rank can't read a parameter. Returns what its
        reading raised first, with the parameter's name as a note. Whatever else fails is raised, and leaves the other
        ranks in a collective call.
        """
        failures: list[Exception] = []
        if bucket.stage == self.parallel.pp_rank:
            Filling(self, bucket, views(bucket, flat), read, failures).run()
            for owner, start, end in _owned_runs(bucket):
                if self.parallel.ep_size > 1:
                    dist.broadcast(flat[start:end], group=self.parallel.ep_group(), group_src=owner)
        size, group = self._pipeline()
        if everywhere and size > 1:
            dist.broadcast(flat, group=group(), group_src=bucket.stage)
        return failures[0] if failures else None


class Filling:
    """One bucket in the making, on a rank of its pipeline stage.

    tensors: views of the bucket, by name. failures: what could not be read is added here.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        bucket: Bucket,
        tensors: dict[str, torch.Tensor],
        read: Read,
        failures: list[Exception],
    ):
        self.gatherer, self.parallel, self.bucket = gatherer, gatherer.parallel, bucket
        self.tensors, self.read, self.failures = tensors, read, failures

    def run(self) -> None:
        """Write all entries that this rank's tensor-parallel groups hold."""
        parallel = self.parallel
        dense, experts = [], []
        for planned in self.bucket.entries:
            entry = planned.entry
            if entry.stacked:
                self._stacked(planned)
                continue
            own = self.gatherer.own.get(planned)
            if own is None:
                continue  # another expert-parallel rank's
            size = parallel.etp_size if entry.is_expert else parallel.tp_size
            if size == 1 or not entry.kind.sharded:
                self._put(entry, [self._value(entry, own[0])])
            else:
                (experts if entry.is_expert else dense).append((entry, own[0]))
        self._gather(dense, parallel.tp_size, parallel.tp_group)
        self._gather(experts, parallel.etp_size, parallel.etp_group)

    def _value(self, entry: Entry, parameter: torch.Tensor) -> torch.Tensor:
        try:
            own = self.read(parameter)
        except Exception as error:
            error.add_note(f"{entry.megatron_name} could not be read")
            self.failures.append(error)
            return torch.empty_like(parameter, device=self.gatherer.device)
        assert (own.shape, own.dtype, own.device) == (parameter.shape, parameter.dtype, parameter.device), (
            f"{entry.megatron_name}: {tuple(own.shape)} {own.dtype} {own.device} was read"
        )
        return own

    def _put(self, entry: Entry, shards: list[torch.Tensor]) -> None:
        for name, tensor in zip(entry.hf_names, entry.kind.merge(shards), strict=True):
            assert tensor.shape == self.tensors[name].shape, f"{name}: {tuple(tensor.shape)} was gathered"
            self.tensors[name].copy_(tensor)
            if name.endswith(EMBEDDING_END) and self.gatherer.plan.tied_head_listed:
                self.tensors[HEAD].copy_(tensor)

    def _gather(self, entries: list[tuple[Entry, torch.Tensor]], size: int, group: Group) -> None:
        """Write entries that are cut over a group, as many in a call as its limit allows."""
        for batch in _batches(entries, batch_limit(self.gatherer.limit) // size):
            starts, end = [], 0
            for _, parameter in batch:
                starts.append(end)
                end += _aligned(parameter)
            shards = self._all_shards(batch, starts, end, size, group)
            for (entry, parameter), start in zip(batch, starts, strict=True):
                self._put(entry, [_piece(shard, start, parameter) for shard in shards])
            del shards

    def _all_shards(
        self, batch: list[tuple[Entry, torch.Tensor]], starts: list[int], end: int, size: int, group: Group
    ) -> torch.Tensor:
        """uint8 [size, end]: the batch's parameters of every rank of a group, each from its start on."""
        own = torch.empty(end, dtype=torch.uint8, device=self.gatherer.device)
        for (entry, parameter), start in zip(batch, starts, strict=True):
            _piece(own, start, parameter).copy_(self._value(entry, parameter))
        return _gathered(own, size, group)

    def _stacked(self, planned: PlannedEntry) -> None:
        """Write an entry whose tensors hold all experts: those of this rank, of all ranks, then of all their shards."""
        entry, parallel = planned.entry, self.parallel
        value = torch.stack([self._value(entry, parameter) for parameter in self.gatherer.own[planned]])
        value = _gathered(value, parallel.ep_size, parallel.ep_group).flatten(0, 1)
        if entry.kind.sharded:
            self._put(entry, list(_gathered(value, parallel.etp_size, parallel.etp_group)))
        else:
            self._put(entry, [value])


def views(bucket: Bucket, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, by name, in `flat`, uint8 [bucket.nbytes]."""
    return {
        name: flat[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape)
        for name, slot in bucket.slots.items()
    }


def _owned_runs(bucket: Bucket) -> Iterator[tuple[int, int, int]]:
    """(expert-parallel rank, start, end) of every piece of the bucket's memory that one rank alone has written."""
    owner, start, end = None, 0, 0
    for slot in bucket.slots.values():
        if slot.owner != owner:
            if owner is not None and end > start:
                yield owner, start, end
            owner, start = slot.owner, slot.start
        end = slot.start + slot.nbytes
    if owner is not None and end > start:
        yield owner, start, end


def _batches(entries: list[tuple[Entry, torch.Tensor]], limit: int) -> Iterator[list[tuple[Entry, torch.Tensor]]]:
    """Runs of entries of at most `limit` bytes of own shards together, or a single larger one."""
    batch, filled = [], 0
    for entry, parameter in entries:
        if batch and filled + _aligned(parameter) > limit:
            yield batch
            batch, filled = [], 0
        batch.append((entry, parameter))
        filled += _aligned(parameter)
    if batch:
        yield batch


def _aligned(parameter: torch.Tensor) -> int:
    return -(-tensor_bytes(parameter.shape, parameter.dtype) // ALIGNMENT) * ALIGNMENT


def _piece(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes from `start` as a tensor of the shape and dtype of `like`."""
    return flat[start : start + tensor_bytes(like.shape, like.dtype)].view(like.dtype).view(like.shape)


def _gathered(value: torch.Tensor, size: int, group: Group) -> torch.Tensor:
    """[size, *value.shape]: the value of every rank of a group."""
    if size == 1:
        return value[None]
    value = value.contiguous()
    result = value.new_empty(size, *value.shape)
    # As bytes: gloo does not gather every dtype.
    dist.all_gather_into_tensor(result.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8), group=group())
    return result
