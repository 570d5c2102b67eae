import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import torch

from miles.weight_sync.bucket import empty_bucket, handle, views
from miles.weight_sync.plan import Bucket, Slot

CPU = torch.device("cpu")


def bucket_of(tensors):
    """The bucket of {name: tensor} and its memory, filled."""
    slots, start = {}, 0
    for name, tensor in tensors.items():
        slots[name] = Slot(name, tuple(tensor.shape), tensor.dtype, start, None)
        start += slots[name].nbytes
    bucket = Bucket(0, (), slots, start, start, 0)
    flat = empty_bucket(start, CPU, shared=True)
    for name, view in views(bucket, flat).items():
        view.copy_(tensors[name])
    return bucket, flat


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


@pytest.mark.real
def test_an_unrelated_process_reads_each_handle_once():
    """Two dtypes, a view that is not contiguous, an empty tensor."""
    tensors = {
        "a": torch.arange(4.0).view(2, 2).t(),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.zeros(0, dtype=torch.bfloat16),
    }
    bucket, flat = bucket_of(tensors)
    handles = f"{handle(bucket, flat)}\n{handle(bucket, flat)}"
    files = {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}
    assert len(files) == 1, "a handle copied the bucket"
    out = subprocess.run([sys.executable, "-c", READ], input=handles, capture_output=True, text=True, timeout=300)
    lines = ["a torch.float32 [[0.0, 2.0], [1.0, 3.0]]", "b torch.bfloat16 [1.0, 1.0, 1.0]", "c torch.bfloat16 []"]
    assert out.stdout.splitlines() == lines * 2, out.stderr[-2000:]
    del flat
    assert not files & set(os.listdir("/dev/shm"))


def test_too_little_shared_memory_is_said(monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(3))
    with pytest.raises(ValueError, match="--update-weight-buffer-size"):
        empty_bucket(4, CPU, shared=True)
    assert empty_bucket(4, CPU, shared=False).nbytes == 4


def test_a_bucket_of_nothing():
    assert empty_bucket(0, CPU, shared=True).nbytes == 0
