"""Grouping tensors into buckets, and handing a bucket to processes on the same machine through shared memory."""

import shutil
from collections.abc import Iterable, Iterator

import torch
import torch.multiprocessing

from miles.weight_sync.gather import NamedTensor

SHARED_MEMORY = "/dev/shm"


def buckets(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Cut a stream of tensors into lists of contiguous tensors of one dtype, of at most `max_bytes` together.

    A tensor larger than `max_bytes` is a bucket of its own. The order is kept; nothing gives no bucket.
    """
    bucket: list[NamedTensor] = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (filled + size > max_bytes or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor.contiguous()))
        filled += size
    if bucket:
        yield bucket


class SharedBucket:
    """A bucket as one flat tensor that another process on this machine can open: shared memory, or CUDA IPC on a GPU.

    `handle()` gives the text for SGLang's `load_format="flattened_bucket"`, to be opened once: ask for one a receiver.
    Keep the object until all receivers have answered; its memory is freed with it.
    Raises ValueError where the machine's shared memory is too small for the bucket.
    """

    def __init__(self, bucket: list[NamedTensor]):
        # sglang takes seconds to import, and only ranks that serve an engine need it.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        self._flat = FlattenedTensorBucket(named_tensors=bucket)
        tensor = self._flat.get_flattened_tensor()
        if tensor.is_cuda:
            # Without it CUDA IPC names a device by its number, which differs between processes that see different GPUs.
            monkey_patch_torch_reductions()
            return
        size, free = tensor.numel(), shutil.disk_usage(SHARED_MEMORY).free
        if size > free:
            raise ValueError(
                f"a bucket of {size:,} bytes does not fit into {SHARED_MEMORY}, which has {free:,} left: lower "
                "--update-weight-buffer-size or give the container more shared memory (docker run --shm-size)"
            )

    def handle(self) -> str:
        from sglang.srt.utils import MultiprocessingSerializer

        payload = {
            "flattened_tensor": self._flat.get_flattened_tensor(),
            "metadata": self._flat.get_metadata(),
        }
        # The other strategy passes file descriptors, which only a child of this process can receive.
        previous = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            return MultiprocessingSerializer.serialize(payload, output_str=True)
        finally:
            torch.multiprocessing.set_sharing_strategy(previous)
