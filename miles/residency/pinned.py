"""Host memory for copies to and from a device: exactly as big as asked for, page aligned, pinned on request.

torch's pinned allocator rounds sizes up to powers of two, and pins while it faults the pages in one by one.
"""

import contextlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from miles.utils.errors import UserError

PREFAULT_PIECE = 256 * 2**20


class HostBuffer:
    """`nbytes` of host memory as the flat uint8 tensor `.tensor`, all of it present; pinned for a GPU if asked.

    Views of the tensor keep the memory alive after `free()`, so that none of them can dangle.

    Raises:
        ValueError: the memory is not there, or can't be pinned; says how much is needed and free, and ends in `remedy`.
    """

    def __init__(self, nbytes: int, pinned: bool, remedy: str):
        _check_free(nbytes, nbytes, remedy)
        try:
            memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UserError(_shortage(nbytes, free_host_bytes(), f"{error.strerror}; {remedy}")) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages; they only make faults and pinning faster
            memory.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
        _prefault(tensor, remedy)
        self._pinned = pinned and nbytes > 0
        if self._pinned:
            _pin(tensor, remedy)
        self.tensor = tensor

    def free(self) -> None:
        """Unpin the memory and give it back, once."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        del self.tensor


def _prefault(tensor: torch.Tensor, remedy: str) -> None:
    # Threads, because the kernel clears pages at a few GB/s a core; numpy's assignment releases the interpreter's lock.
    array, total = tensor.numpy(), len(tensor)

    def touch(start: int) -> None:
        # Asked again for each piece: other ranks of this host take memory at the same time.
        _check_free(min(PREFAULT_PIECE, total - start), total, remedy)
        array[start : start + PREFAULT_PIECE : mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(touch, range(0, total, PREFAULT_PIECE)):
            pass


def _pin(tensor: torch.Tensor, remedy: str) -> None:
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(tensor.data_ptr(), len(tensor), 0)
    if code != runtime.cudaError.success:
        # The runtime reports the error once more at the next launch: let that be this one.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise UserError(
            f"pinning {len(tensor):,} bytes of host memory failed ({code}), {free_host_bytes():,} are free: raise the "
            f"limit of locked memory (ulimit -l unlimited, docker run --ulimit memlock=-1), or {remedy}"
        )


def _check_free(nbytes: int, total: int, remedy: str) -> None:
    free = free_host_bytes()
    if nbytes > free:
        raise UserError(_shortage(total, free, remedy))


def _shortage(nbytes: int, free: int, remedy: str) -> str:
    return f"{nbytes:,} bytes of host memory are needed and {free:,} are free: {remedy}"


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process can still take: what the machine has left, and each of its control groups.

    `root`: where /proc and /sys are.
    """
    meminfo = (root / "proc/meminfo").read_text()
    free = [int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = base / path.lstrip("/")  # in a container it may name a folder of the host's, which is not there
        while group.is_relative_to(base):
            free.extend(_group_free_bytes(group, *names))
            group = group.parent
    return max(0, min(free))


def _group_free_bytes(group: Path, limit_name: str, usage_name: str, prefix: str) -> list[int]:
    if not (group / limit_name).exists():
        return []
    limit = (group / limit_name).read_text().strip()
    if limit == "max":
        return []
    used = int((group / usage_name).read_text())
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # Cached files make room when memory is asked for, those that are used often as well.
    cached = sum(int(statistics[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
    return [int(limit) - used + cached]
