import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import torch

from miles.weight_sync.bucket import SharedBucket, buckets


def sizes(*numbers, dtype=torch.uint8):
    return [(str(i), torch.zeros(n, dtype=dtype)) for i, n in enumerate(numbers)]


@pytest.mark.parametrize(
    "numbers, expected",
    [
        ([], []),
        ([4, 4], [["0", "1"]]),
        ([4, 5, 3], [["0"], ["1", "2"]]),
        ([100], [["0"]]),
        ([1, 100, 1], [["0"], ["1"], ["2"]]),
        ([0, 8, 0], [["0", "1", "2"]]),
    ],
)
def test_buckets_of_eight_bytes(numbers, expected):
    assert [[name for name, _ in bucket] for bucket in buckets(sizes(*numbers), 8)] == expected


def test_one_dtype_a_bucket_in_order():
    tensors = [("a", torch.zeros(2)), ("b", torch.zeros(2).bfloat16()), ("c", torch.zeros(2).bfloat16())]
    assert [[name for name, _ in bucket] for bucket in buckets(tensors, 100)] == [["a"], ["b", "c"]]


def test_a_view_becomes_contiguous():
    (((_, tensor),),) = buckets([("a", torch.arange(6.0).view(2, 3).t())], 100)
    assert tensor.is_contiguous() and tensor.tolist() == [[0, 3], [1, 4], [2, 5]]


READ = """
import sys
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
def read(handle):  # a function, so that its tensors are gone, and with them the shared memory, before the process ends
    for name, tensor in FlattenedTensorBucket(**MultiprocessingSerializer.deserialize(handle)).reconstruct_tensors():
        print(name, tensor.dtype, tensor.tolist())
for handle in sys.stdin.read().split():
    read(handle)
"""


def test_an_unrelated_process_reads_each_handle_once():
    tensors = [("a", torch.arange(4.0).view(2, 2)), ("b", torch.ones(3)), ("c", torch.tensor(7.0))]
    (bucket,) = buckets(tensors, 1000)
    shared = SharedBucket(bucket)
    handles = f"{shared.handle()}\n{shared.handle()}"
    out = subprocess.run([sys.executable, "-c", READ], input=handles, capture_output=True, text=True, timeout=100)
    lines = ["a torch.float32 [[0.0, 1.0], [2.0, 3.0]]", "b torch.float32 [1.0, 1.0, 1.0]", "c torch.float32 7.0"]
    assert out.stdout.splitlines() == lines * 2, out.stderr[-2000:]
    del shared
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")] == []


def test_too_little_shared_memory_is_said(monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(3))
    with pytest.raises(ValueError, match="--update-weight-buffer-size"):
        SharedBucket(sizes(4))
