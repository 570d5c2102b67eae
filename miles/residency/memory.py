"""Where a trainer's device memory lives, by tag: memory that can leave while every tensor in it keeps its identity.

`pack` gathers tensors in one flat buffer of a tag, so that a region is moved by one copy at the speed of the link.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from miles.utils.errors import UserError
from miles.utils.host_memory import return_freed_memory

PART_ALIGNMENT = 256  # of the parts of a packed buffer: what torch's own allocations have on a GPU
ITEM_ALIGNMENT = 16  # of the largest element there is (complex128)
PATIENCE_S = 30.0  # for another process on the device that is still letting go of its memory


class DeviceMemory(Protocol):
    """Device memory in regions named by a tag.

    Each verb needs the tag's memory mapped, `restore` needs it released; RuntimeError otherwise, with nothing done.
    Those that take memory raise torch.OutOfMemoryError where there is none; `rehome` has lost the contents then.
    """

    def allocate(self, nbytes: int, tag: str) -> torch.Tensor:
        """A flat uint8 tensor on the device, zeroed, in the tag's region. It lives as long as this object."""
        ...

    def rehome(self, storage: torch.UntypedStorage, tag: str, keep: bool) -> None:
        """Move a storage's memory into the tag's region, under all its tensors; contents kept, or zeroed."""
        ...

    def release(self, tag: str) -> int:
        """Give the tag's memory back to the device, contents lost; tensors keep their identity. Returns the bytes."""
        ...

    def restore(self, tag: str) -> int:
        """Put memory behind the tag's tensors again, contents undefined. Returns the bytes."""
        ...


class Saver(Protocol):
    """What is used of torch_memory_saver. It ends the process on a pause or resume that is not due."""

    def region(self, tag: str, enable_cpu_backup: bool) -> AbstractContextManager: ...
    def pause(self, tag: str) -> None: ...
    def resume(self, tag: str) -> None: ...


def device_memory(device: str, margin_bytes: int, remedy: str) -> DeviceMemory:
    """The memory of `device` ("cpu" or "cuda", this rank's); `margin_bytes` stay free on a GPU when memory returns.

    remedy: what a user can do where a GPU has no room.

    Raises:
        ValueError: torch's allocator is set to expandable segments, which torch_memory_saver does not support.
    """
    if torch.device(device).type == "cpu":
        return CpuMemory()
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        setting = os.environ.get(variable, "")
        if "expandable_segments:True" in setting:
            raise UserError(
                f"{variable}={setting}: memory of expandable segments can't leave the GPU, as it must with "
                "--offload-train: remove expandable_segments:True"
            )
    return TorchMemorySaverMemory(_torch_memory_saver(), device, margin_bytes, remedy)


@cache
def _torch_memory_saver() -> Saver:
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = (
        "torch"  # its own memory pool; the other mode needs LD_PRELOAD. Can be set once only.
    )
    return torch_memory_saver


class _Tags:
    """What each tag holds and whether its memory is there."""

    def __init__(self):
        self._storages: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}
        self._states: dict[str, str] = {}

    def check(self, tag: str, expected: str, verb: str) -> None:
        state = self._states.get(tag, "empty")
        if state != expected:
            raise RuntimeError(f"can't {verb} the memory of tag {tag!r}: it is {state}, expected {expected}")

    def check_addition(self, tag: str, verb: str) -> None:
        if tag in self._states:
            self.check(tag, "mapped", verb)

    def add(self, tag: str, storage: torch.UntypedStorage) -> None:
        assert all(storage._cdata != held._cdata for held, _ in self._storages.get(tag, [])), f"already in {tag!r}"
        # A strong reference: a storage that dies while its memory is unmapped makes torch_memory_saver end the process.
        self._storages.setdefault(tag, []).append((storage, storage.nbytes()))
        self._states[tag] = "mapped"

    def storages(self, tag: str) -> list[tuple[torch.UntypedStorage, int]]:
        return self._storages[tag]

    def nbytes(self, tag: str) -> int:
        return sum(nbytes for _, nbytes in self._storages[tag])

    @contextmanager
    def transition(self, tag: str, target: str) -> Iterator[None]:
        self._states[tag] = "broken"  # stays so if the body raises: nobody knows then what is mapped
        yield
        self._states[tag] = target


class TorchMemorySaverMemory:
    """Memory of the current CUDA device that torch_memory_saver maps and unmaps; it never copies contents itself."""

    def __init__(self, saver: Saver, device: str, margin_bytes: int, remedy: str):
        self._saver = saver
        self._device = device
        self._margin_bytes = margin_bytes
        self._remedy = remedy
        self._tags = _Tags()

    def allocate(self, nbytes: int, tag: str) -> torch.Tensor:
        self._tags.check_addition(tag, "add to")
        self._wait_for_room(f"add {nbytes:,} bytes to", tag, _segment_bytes(nbytes), margin_bytes=0)
        with self._saver.region(tag=tag, enable_cpu_backup=False):
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._tags.add(tag, buffer.untyped_storage())
        return buffer

    def rehome(self, storage: torch.UntypedStorage, tag: str, keep: bool) -> None:
        self._tags.check_addition(tag, "add to")
        nbytes = storage.nbytes()
        contents = bytes_of(storage).to("cpu", copy=True) if keep else None
        storage.resize_(0)
        # It empties the cache, else both copies would be on the device for a moment.
        self._wait_for_room(f"add {nbytes:,} bytes to", tag, _segment_bytes(nbytes), margin_bytes=0)
        with self._saver.region(tag=tag, enable_cpu_backup=False):
            storage.resize_(nbytes)
        self._tags.add(tag, storage)
        if contents is None:
            bytes_of(storage).zero_()
        else:
            bytes_of(storage).copy_(contents)

    def release(self, tag: str) -> int:
        self._tags.check(tag, "mapped", "release")
        torch.cuda.synchronize()  # a kernel still at work on unmapped memory ends the process
        with self._tags.transition(tag, "released"):
            self._saver.pause(tag)
        return self._tags.nbytes(tag)

    def restore(self, tag: str) -> int:
        self._tags.check(tag, "released", "restore")
        needed = sum(_segment_bytes(nbytes) for _, nbytes in self._tags.storages(tag))
        self._wait_for_room("restore", tag, needed, self._margin_bytes)
        with self._tags.transition(tag, "mapped"):
            self._saver.resume(tag)
        return self._tags.nbytes(tag)

    def _wait_for_room(self, verb: str, tag: str, needed: int, margin_bytes: int) -> None:
        """Wait until that much is free: without room torch_memory_saver ends the process, whatever torch caches."""
        torch.cuda.empty_cache()
        deadline = time.monotonic() + PATIENCE_S
        while (free := torch.cuda.mem_get_info()[0]) < needed + margin_bytes:
            if time.monotonic() > deadline:
                lower = "lower --train-memory-margin-bytes, or " if margin_bytes else ""
                raise torch.OutOfMemoryError(
                    f"no room to {verb} tag {tag!r}: {needed:,} bytes and a margin of {margin_bytes:,} are "
                    f"needed, {free:,} were free after {PATIENCE_S:.0f} s; this process holds "
                    f"{torch.cuda.memory_allocated():,} bytes in tensors, {torch.cuda.memory_reserved():,} with caches "
                    f"and what is released. Did the engines release their memory? Else {lower}{self._remedy}"
                )
            time.sleep(0.02)


class CpuMemory:
    """The same for tensors on a CPU: released storages have a size of 0 and their memory is really freed."""

    def __init__(self):
        self._tags = _Tags()

    def allocate(self, nbytes: int, tag: str) -> torch.Tensor:
        self._tags.check_addition(tag, "add to")
        buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self._tags.add(tag, buffer.untyped_storage())
        return buffer

    def rehome(self, storage: torch.UntypedStorage, tag: str, keep: bool) -> None:
        self._tags.check_addition(tag, "add to")
        self._tags.add(tag, storage)
        if not keep:
            bytes_of(storage).zero_()

    def release(self, tag: str) -> int:
        self._tags.check(tag, "mapped", "release")
        with self._tags.transition(tag, "released"):
            for storage, _ in self._tags.storages(tag):
                storage.resize_(0)
            return_freed_memory()
        return self._tags.nbytes(tag)

    def restore(self, tag: str) -> int:
        self._tags.check(tag, "released", "restore")
        with self._tags.transition(tag, "mapped"):
            for storage, nbytes in self._tags.storages(tag):
                storage.resize_(nbytes)
        return self._tags.nbytes(tag)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _segment_bytes(nbytes: int) -> int:
    """The most that torch's caching allocator takes from the device for one storage."""
    mib = 2**20
    return -(-nbytes // (2 * mib)) * 2 * mib if nbytes >= 10 * mib else 20 * mib


@dataclass
class _Part:
    """A range of bytes of one storage, and the tensors that lie in it."""

    start: int
    end: int
    tensors: list[torch.Tensor]


def pack(tensors: Sequence[torch.Tensor], memory: DeviceMemory, tag: str) -> torch.Tensor:
    """Move tensors of the same device into one flat uint8 buffer of the tag, contents kept.

    Each tensor's `.data` becomes a view of the buffer with the same dtype, shape and strides; parts start at multiples
    of 256 bytes. Tensors that share bytes keep sharing them. Old memory is freed as it is replaced, so that the buffer
    is all the extra memory taken; storages that other tensors still use stay.
    """
    parts = _parts(tensors)
    offsets, total = [], 0
    for part in parts:
        offsets.append(total)
        total += -(-(part.end - part.start) // PART_ALIGNMENT) * PART_ALIGNMENT
    buffer = memory.allocate(total, tag)
    for part, offset in zip(parts, offsets, strict=True):
        _move(part, buffer, offset)
    return buffer


def _parts(tensors: Sequence[torch.Tensor]) -> list[_Part]:
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        assert tensor.device == tensors[0].device, f"a tensor on {tensor.device} among tensors on {tensors[0].device}"
        by_storage.setdefault(_identity(tensor), []).append(tensor)
    parts: list[_Part] = []
    for members in by_storage.values():
        last = None
        for tensor in sorted(members, key=_start):
            start, end = _start(tensor), _start(tensor) + _extent(tensor)
            if last is None or start >= last.end:
                # Rounded down, so that elements of every size in it are aligned in the buffer as they were here.
                last = _Part(start // ITEM_ALIGNMENT * ITEM_ALIGNMENT, end, [])
                parts.append(last)
            last.end = max(last.end, end)
            last.tensors.append(tensor)
    return parts


def _move(part: _Part, buffer: torch.Tensor, offset: int) -> None:
    old = bytes_of(part.tensors[0].untyped_storage())[part.start : part.end]
    buffer[offset : offset + len(old)].copy_(old)
    for tensor in part.tensors:
        start = (offset + _start(tensor) - part.start) // tensor.element_size()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = view.set_(buffer.untyped_storage(), start, tensor.shape, tensor.stride())


def span(buffer: torch.Tensor, tensor: torch.Tensor) -> tuple[int, int] | None:
    """(offset, bytes) of a contiguous tensor in a flat uint8 buffer; None if it lies elsewhere.

    Reads metadata only, so it works while the memory is released.
    """
    assert tensor.is_contiguous(), f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has no span"
    if _identity(tensor) != _identity(buffer):
        return None
    offset, nbytes = _start(tensor) - _start(buffer), tensor.numel() * tensor.element_size()
    if offset + nbytes <= 0 or offset >= buffer.numel():
        return None
    assert offset >= 0 and offset + nbytes <= buffer.numel(), "a tensor that lies partly in the buffer"
    return offset, nbytes


def _identity(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # survives resize_(0), which data_ptr() does not


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last, gaps included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
