"""Filling buckets with what engines take: a source's full tensors, in the engines' format."""

from collections.abc import Iterator
from functools import cached_property

import torch

from miles.weight_sync.bucket import views
from miles.weight_sync.format import EngineFormat
from miles.weight_sync.plan import Bucket, plan_buckets
from miles.weight_sync.source import WeightSource


class Gatherer:
    """Fills the buckets of a sync, in lockstep on all ranks of the source.

    Args:
        source: which tensors there are, and their values.
        engine_format: what engines are sent for each.
        limit: bytes of a bucket, see `plan_buckets`.
    """

    def __init__(self, source: WeightSource, engine_format: EngineFormat, limit: int):
        self.source, self.engine_format, self.limit = source, engine_format, limit

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The buckets of a sync, the same on every rank. The first use may be a collective call."""
        return plan_buckets(self.source.parts(self.limit), self.engine_format, self.limit)

    def fill(self, bucket: Bucket, flat: torch.Tensor, everywhere: bool) -> Exception | None:
        """Write the bucket's tensors into `flat`, uint8 [bucket.nbytes]; see `views`.

        With `everywhere` all ranks call it and have the bytes afterwards, else those of the bucket's pipeline stage.
        Returns and raises what `WeightSource.fill` does.
        """
        failure = None
        if bucket.stage == self.source.stage:
            failure = self.source.fill(bucket.parts, self.limit, _Writer(self.engine_format, views(bucket, flat)))
            for owner, start, end in _owned_runs(bucket):
                self.source.share_owned(flat[start:end], owner)
        if everywhere:
            self.source.share_stage(flat, bucket.stage)
        return failure


class _Writer:
    """Copies what engines take of a tensor to its places in a bucket."""

    def __init__(self, engine_format: EngineFormat, places: dict[str, torch.Tensor]):
        self.engine_format, self.places = engine_format, places

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        for slot, value in self.engine_format.encode(name, tensor).items():
            place = self.places[slot]
            assert (value.shape, value.dtype) == (place.shape, place.dtype), (
                f"{slot}: {tuple(value.shape)} {value.dtype} was given, {tuple(place.shape)} {place.dtype} planned"
            )
            place.copy_(value)


def _owned_runs(bucket: Bucket) -> Iterator[tuple[int, int, int]]:
    """(owner, start, end) of every piece of the bucket's memory that one rank alone has written."""
    owner, start, end = None, 0, 0
    for slot in bucket.slots.values():
        if slot.owner != owner:
            if owner is not None and end > start:
                yield owner, start, end
            owner, start = slot.owner, slot.start
        end = slot.start + slot.nbytes
    if owner is not None and end > start:
        yield owner, start, end
