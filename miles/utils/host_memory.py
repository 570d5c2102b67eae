"""The host memory of this process."""

import ctypes
import resource

_libc = ctypes.CDLL(None)


def return_freed_memory() -> None:
    """Give what was freed back to the system: of small blocks (a threshold, up to 32 MiB) the C library keeps it."""
    _libc.malloc_trim(0)


def resident_bytes() -> int:
    """Host memory that this process holds now, pinned buffers included."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
