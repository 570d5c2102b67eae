"""The weights of a Megatron model as the sync takes them: which there are, who has them, and how they become whole."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.hf_weights import (
    check_names_and_shapes,
    check_parameters,
    chunk_entries,
    held_entries,
    model_tensors,
    untrained_names,
)
from miles.backends.megatron_utils.weight_merge import HeldEntry, Merge, batch_limit
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.entries import EMBEDDING_END, HEAD, Entry
from miles.hf.layouts import Layout
from miles.hf.parallel import ParallelInfo
from miles.weight_sync.live_bytes import LiveBytes
from miles.weight_sync.source import FullTensor, Read, SourcePart, Write, live

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64)


@dataclass(frozen=True)
class PlannedEntry:
    """An entry, and the pipeline stage and the chunk of that stage's model that it belongs to.

    Args:
        with_head: the checkpoint lists the head of a tied model, and this is the embedding: it is given under both
            names.
    """

    stage: int
    chunk: int
    entry: Entry
    with_head: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes by the checkpoint's names."""
        shapes = dict(zip(self.entry.hf_names, self.entry.shapes, strict=True))
        return shapes | {HEAD: self.entry.shapes[0]} if self.with_head else shapes


def plan_entries(
    family: Family, hf_config: PreTrainedConfig, parallel: ParallelInfo, index: CheckpointIndex
) -> list[PlannedEntry]:
    """All that a model gives, in the order of its layers, compared with its checkpoint; `parallel` of any rank.

    Raises:
        ValueError: names or shapes of the two differ, or there are none: an engine accepts an unknown name without a
            word and dies of a wrong shape.
    """
    tied_head_listed = hf_config.tie_word_embeddings and HEAD in index
    planned = [
        PlannedEntry(stage, chunk, entry, tied_head_listed and entry.hf_names[0].endswith(EMBEDDING_END))
        for chunk in range(len(parallel.chunk_layers[0]))
        for stage in range(parallel.pp_size)
        for entry in chunk_entries(family, hf_config, parallel, index, stage, chunk)
        if not entry.load_only
    ]
    if not planned:
        raise ValueError(f"{type(family).__name__} lists no weights at all: there is nothing to send")
    check_names_and_shapes(index, [each.entry for each in planned], family, hf_config)
    return planned


class MegatronWeights:
    """A `WeightSource`: the weights of a Megatron model under the names and in the layouts of its checkpoint.

    Args:
        chunks: this stage's GPTModels, unwrapped; of their parameters only names, shapes, dtypes and devices are used.
        family: of the model.
        hf_config: its configuration.
        parallel: this rank's place.
        index: the checkpoint that the model came from.
        read: gives the parameters' values.
        copies: `read` may give copies; False promises that it gives the parameters' own memory.

    Raises:
        ValueError: the model, its family and the checkpoint differ.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        family: Family,
        hf_config: PreTrainedConfig,
        parallel: ParallelInfo,
        index: CheckpointIndex,
        read: Read = live,
        copies: bool = False,
    ):
        self.parallel, self.index, self.read, self.copies = parallel, index, read, copies
        self.planned = plan_entries(family, hf_config, parallel, index)
        self.untrained: Sequence[str] = untrained_names(index, family, hf_config)
        # Of every entry of a chunk that this rank has something of.
        self.held: dict[tuple[int, Entry], torch.Tensor] = {}
        for number, chunk in enumerate(chunks):
            parameters = model_tensors(chunk)
            held = held_entries(chunk_entries(family, hf_config, parallel, index, parallel.pp_rank, number), parallel)
            check_parameters(parameters, held)
            for entry in held:
                self.held[number, entry] = parameters[entry.megatron_name]
        self.device = next(iter(self.held.values())).device
        self.stage, self.stages = parallel.pp_rank, parallel.pp_size

    def parts(self, limit: int) -> list[SourcePart]:
        """See `WeightSource`. The first call is a collective one."""
        return [
            SourcePart(
                key=planned,
                tensors=tuple(FullTensor(name, tuple(shape), dtype) for name, shape in planned.shapes.items()),
                stage=planned.stage,
                owner=planned.entry.ep_rank,
                atomic=planned.entry.atomic,
                scratch=merge_scratch(planned.entry, dtype, self._shards_of(planned.entry), limit, self.copies),
            )
            for planned, dtype in zip(self.planned, self._dtypes, strict=True)
        ]

    @cached_property
    def _dtypes(self) -> list[torch.dtype]:
        """Of every planned entry. Only those who hold it know."""
        codes = torch.zeros(len(self.planned), dtype=torch.int32)
        for number, planned in enumerate(self.planned):
            if (parameter := self._parameter(planned)) is not None:
                codes[number] = 1 + DTYPES.index(parameter.dtype)
        codes, parallel = codes.to(self.device), self.parallel
        for size, group in ((parallel.ep_size, parallel.ep_group), (parallel.pp_size, parallel.pp_group)):
            if size > 1:
                dist.all_reduce(codes, dist.ReduceOp.MAX, group=group())
        assert codes.min() > 0, "no rank holds an entry"
        return [DTYPES[code - 1] for code in codes.tolist()]

    def _parameter(self, planned: PlannedEntry) -> torch.Tensor | None:
        """That of this rank, if it has one."""
        return self.held.get((planned.chunk, planned.entry)) if planned.stage == self.stage else None

    def _shards_of(self, entry: Entry) -> int:
        return self.parallel.etp_size if entry.is_expert else self.parallel.tp_size

    def fill(self, parts: Sequence[SourcePart], limit: int, write: Write) -> Exception | None:
        """See `WeightSource`."""
        held = [
            HeldEntry(planned.entry, parameter, planned.with_head)
            for planned in (part.key for part in parts)
            if (parameter := self._parameter(planned)) is not None
        ]
        merge = Merge(self.parallel, self.device, self.read, write)
        merge.run(held, limit)
        return merge.failure

    def share_owned(self, piece: torch.Tensor, owner: int) -> None:
        """See `WeightSource`."""
        if self.parallel.ep_size > 1:
            dist.broadcast(piece, group=self.parallel.ep_group(), group_src=owner)

    def share_stage(self, flat: torch.Tensor, stage: int) -> None:
        """See `WeightSource`."""
        if self.stages > 1:
            dist.broadcast(flat, group=self.parallel.pp_group(), group_src=stage)


def merge_scratch(entry: Entry, dtype: torch.dtype, size: int, limit: int, copies: bool) -> int:
    """Most bytes that gathering an entry over `size` ranks takes beside what it is written to.

    A batch's own shards and all ranks' shards; of the entry that is in work, the shard that was read, with `copies`,
    and the full tensors where the layout copies them.
    """
    full = sum(torch.Size(shape).numel() for shape in entry.shapes) * dtype.itemsize
    merging = _merge_bytes(entry.kind, entry.shapes, size, dtype)
    if entry.stacked:
        return 3 * full + merging
    if size == 1 or not entry.kind.sharded:
        return full * copies + merging
    # Shards are a row longer where a vocabulary is padded.
    batch = max(full + full // max(entry.shapes[0][0], 1) * size, batch_limit(limit))
    return batch + max(batch // size + full // size * copies, merging)


@functools.lru_cache(maxsize=4096)
def _merge_bytes(kind: Layout, shapes: tuple[tuple[int, ...], ...], size: int, dtype: torch.dtype) -> int:
    """Most bytes that `kind.merge` has at a time, beside its arguments; none where it gives views of them."""
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    ranks = range(size if kind.sharded else 1)
    shards = [torch.empty_like(kind.split(tensors, rank, size)) for rank in ranks]
    with LiveBytes() as alive:
        kind.merge(shards)
    return alive.peak
