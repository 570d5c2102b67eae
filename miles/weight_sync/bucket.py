"""The memory of a bucket, and handing it to other processes on the same machine without a copy."""

import shutil

import torch
import torch.multiprocessing

from miles.utils.errors import UserError
from miles.weight_sync.plan import Bucket

SHARED_MEMORY = "/dev/shm"


def empty_bucket(nbytes: int, device: torch.device, shared: bool) -> torch.Tensor:
    """uint8 [nbytes] on `device`, uninitialised.

    Args:
        nbytes: of the bucket.
        device: where it is made.
        shared: other processes will open it (`handle`). On a CPU that takes shared memory; on a GPU any memory will do.

    Raises:
        ValueError: the machine's shared memory is too small for it.
    """
    if not shared or device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if nbytes > free:
        raise UserError(
            f"a bucket of {nbytes:,} bytes does not fit into {SHARED_MEMORY}, which has {free:,} left: lower "
            "--update-weight-buffer-size or give the container more shared memory (docker run --shm-size)"
        )
    # An ordinary tensor would be copied into shared memory by its first handle.
    storage = torch.UntypedStorage._new_using_filename_cpu(max(nbytes, 1))
    return torch.tensor([], dtype=torch.uint8).set_(storage)[:nbytes]


def views(bucket: Bucket, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, by name, in `flat`, uint8 [bucket.nbytes]."""
    return {
        name: flat[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape)
        for name, slot in bucket.slots.items()
    }


def handle(bucket: Bucket, flat: torch.Tensor) -> str:
    """The text with which one process opens the bucket in `flat` once, for SGLang's `load_format="flattened_bucket"`.

    Keep `flat` until the process has answered: its memory is freed with it.
    """
    # sglang takes seconds to import, and only ranks that serve an engine need it.
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = [
        FlattenedTensorMetadata(
            name=slot.name,
            shape=torch.Size(slot.shape),
            dtype=slot.dtype,
            start_idx=slot.start,
            end_idx=slot.start + slot.nbytes,
            numel=slot.nbytes,
        )
        for slot in bucket.slots.values()
    ]
    payload = {"flattened_tensor": flat, "metadata": metadata}
    if flat.is_cuda:
        # Without it CUDA IPC names a device by its number, which differs between processes that see different GPUs.
        monkey_patch_torch_reductions()
        return MultiprocessingSerializer.serialize(payload, output_str=True)
    # The other strategy passes file descriptors, which only a child of this process can receive.
    previous = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return MultiprocessingSerializer.serialize(payload, output_str=True)
    finally:
        torch.multiprocessing.set_sharing_strategy(previous)
