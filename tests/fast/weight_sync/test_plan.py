"""Cutting parts into buckets, from shapes alone."""

import pytest
import torch

from miles.weight_sync.format import CheckpointFormat
from miles.weight_sync.plan import plan_buckets
from miles.weight_sync.source import FullTensor, SourcePart

U8, BF16, F32 = torch.uint8, torch.bfloat16, torch.float32


def part(name, nbytes, dtype=U8, key=None, stage=0):
    """One tensor, which is copied before it is written."""
    tensor = FullTensor(name, (nbytes // dtype.itemsize,), dtype)
    return SourcePart(name, (tensor,), stage, atomic=key, scratch=nbytes)


def cut(entries, limit):
    """entries: (name, bytes, dtype, atomic key, stage). The names of every bucket."""
    buckets = plan_buckets([part(*entry) for entry in entries], CheckpointFormat(), limit)
    for bucket in buckets:
        assert bucket.nbytes == sum(slot.nbytes for slot in bucket.slots.values())
        assert all(slot.start % slot.dtype.itemsize == 0 for slot in bucket.slots.values())
    return ["".join(bucket.slots) for bucket in buckets]


@pytest.mark.parametrize(
    "sizes, expected",
    [
        # Two buckets and, while one is made, a copy of the largest tensor.
        ([4, 4], ["ab"]),
        ([4, 4, 4], ["ab", "c"]),
        ([4, 5, 3], ["ab", "c"]),
        ([4, 6, 3], ["a", "bc"]),
        ([100], ["a"]),
        ([1, 100, 1], ["a", "b", "c"]),
        ([0, 6, 0], ["abc"]),
        ([0, 0], ["ab"]),
    ],
)
def test_buckets_of_twelve_bytes(sizes, expected):
    assert cut([(name, size, U8, None, 0) for name, size in zip("abcdef", sizes, strict=False)], 12) == expected


def test_dtypes_share_a_bucket_the_widest_first():
    entries = [("a", 2, BF16, None, 0), ("b", 8, F32, None, 0), ("c", 2, BF16, None, 0), ("d", 1, U8, None, 0)]
    assert cut(entries, 100) == ["bacd"]


def test_a_bucket_is_of_one_stage():
    entries = [("a", 1, U8, None, 0), ("b", 1, U8, None, 1), ("c", 1, U8, None, 1), ("d", 1, U8, None, 0)]
    assert cut(entries, 100) == ["a", "bc", "d"]


def test_an_atomic_key_is_in_one_bucket_with_all_in_between():
    entries = [(name, 4, U8, key, 0) for name, key in zip("abcdef", [None, "x", None, "y", "x", "y"], strict=True)]
    assert cut(entries, 12) == ["a", "bcdef"]
    assert cut(entries, 8) == ["a", "bcdef"]
    assert cut(entries, 28) == ["abcdef"]


def test_an_atomic_key_over_stages_is_a_fault_of_the_family():
    with pytest.raises(AssertionError, match="lie on several stages"):
        cut([("a", 1, U8, "x", 0), ("b", 1, U8, "x", 1)], 100)


def test_all_but_large_buckets_take_the_same_memory():
    """So that what one has freed fits the next."""
    parts = [part(str(number), size) for number, size in enumerate([3, 9, 4, 4, 2])]
    buckets = plan_buckets(parts, CheckpointFormat(), 12)
    assert [(bucket.nbytes, bucket.capacity) for bucket in buckets] == [(3, 10), (9, 10), (10, 10)]
    assert max(2 * bucket.capacity + bucket.scratch for bucket in buckets if bucket.scratch <= 4) <= 24
