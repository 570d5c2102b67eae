"""A node-local disk as the place where a trainer's contents go while its device memory is away."""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from miles.residency.filesystem import IN_MEMORY, filesystem_of
from miles.residency.host_store import check_flat
from miles.residency.pinned import HostBuffer
from miles.residency.plan import Place
from miles.utils.errors import UserError

BLOCK = 4096  # what O_DIRECT wants addresses, offsets and sizes to be a multiple of
PIECES = 4  # pieces under way at once: one on its way to or from the device, the others in the disk's queue


@dataclass
class DiskFile:
    """An open file that is read and written whole, past short transfers, and leaves nothing in the page cache."""

    file: BinaryIO
    capacity: int = 0  # bytes set aside on the disk
    nbytes: int | None = None  # bytes of complete contents; None: there are none
    direct: bool = True  # past the page cache

    def write(self, data: torch.Tensor, offset: int) -> None:
        """Write all of `data` (whole blocks, page aligned)."""
        view, done = data.numpy(), 0
        while done < len(view):
            done += self._advance(os.pwrite(self.file.fileno(), view[done:], offset + done))
        if not self.direct:
            os.fdatasync(self.file.fileno())  # a page that is not yet on disk can't be dropped
            self._drop_cache(offset, len(view))

    def read(self, data: torch.Tensor, offset: int) -> None:
        """Fill all of `data` (whole blocks, page aligned)."""
        view, done = data.numpy(), 0
        while done < len(view):
            done += self._advance(os.preadv(self.file.fileno(), [view[done:]], offset + done))
        if not self.direct:
            self._drop_cache(offset, len(view))

    def _advance(self, count: int) -> int:
        whole = count // BLOCK * BLOCK if self.direct else count  # direct I/O goes on from a block's start only
        if whole == 0:
            raise OSError(errno.EIO, "the disk transferred nothing")
        return whole

    def _drop_cache(self, offset: int, nbytes: int) -> None:
        os.posix_fadvise(self.file.fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)


class DiskStore:
    """A file a key, set aside at the first save and overwritten in place, staged through `chunk_bytes` of host memory.

    Files have no name: no other store can reach them, and the kernel frees them whenever the process ends. They bypass
    the page cache where the filesystem allows it, since cached bytes would be on the host again.

    Args:
        folder: on a local disk; made if missing.
        chunk_bytes: host memory for staging, in bytes; pinned if `pinned`, for copies from and to a GPU.
        name: whose store it is, for messages.

    Raises:
        ValueError: the folder can't be made or lies in memory, or there is no host memory for the chunk.
    """

    place = Place.DISK

    def __init__(self, folder: str, chunk_bytes: int, pinned: bool, name: str):
        self._slot_bytes = chunk_bytes // PIECES // BLOCK * BLOCK
        assert self._slot_bytes > 0, f"a chunk of {chunk_bytes} bytes is less than {PIECES} blocks of {BLOCK}"
        self._folder = folder
        self._name = name
        prepare_folder(Path(folder))
        staging = HostBuffer(PIECES * self._slot_bytes, pinned, "lower --offload-train-disk-chunk-mb")
        self._slots = list(staging.tensor.split(self._slot_bytes))
        self._pool = ThreadPoolExecutor(PIECES, thread_name_prefix=f"{name} disk")
        self._files: dict[str, DiskFile] = {}

    def save(self, key: str, source: torch.Tensor) -> None:
        check_flat(source)
        file = self._set_aside(key, len(source))
        file.nbytes = None

        def write(start: int, slot: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
            part = source[start : start + len(slot)]
            _copy(slot[: len(part)], part, stream)
            file.write(slot[: round_up(len(part), BLOCK)], start)

        self._run(f"writing {len(source):,} bytes of {key}", len(source), source.device, write)
        file.nbytes = len(source)

    def load(self, key: str, target: torch.Tensor) -> None:
        check_flat(target)
        file = self._saved(key)
        assert file.nbytes == len(target), f"{key} holds {file.nbytes:,} bytes, the target {len(target):,}"

        def read(start: int, slot: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
            part = target[start : start + len(slot)]
            file.read(slot[: round_up(len(part), BLOCK)], start)
            _copy(part, slot[: len(part)], stream)

        self._run(f"reading {len(target):,} bytes of {key}", len(target), target.device, read)

    def read(self, key: str, offset: int, nbytes: int) -> torch.Tensor:
        file = self._saved(key)
        whole = file.nbytes or 0
        assert 0 <= offset <= offset + nbytes <= whole, f"{key}: {offset} + {nbytes} of {whole} bytes"
        first = offset // BLOCK * BLOCK
        buffer = _aligned(round_up(offset + nbytes, BLOCK) - first)

        def read(start: int, slot: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
            file.read(buffer[start : start + len(slot)], first + start)

        self._run(f"reading {nbytes:,} bytes of {key}", len(buffer), buffer.device, read)
        return buffer[offset - first : offset - first + nbytes]

    def discard(self, key: str) -> None:
        pass  # the file is overwritten by the next save

    def _saved(self, key: str) -> DiskFile:
        assert key in self._files and self._files[key].nbytes is not None, f"nothing is saved under {key!r}"
        return self._files[key]

    def _set_aside(self, key: str, nbytes: int) -> DiskFile:
        """The key's file with room for `nbytes`; a full disk is found out here."""
        capacity = round_up(nbytes, BLOCK)
        if key in self._files and self._files[key].capacity >= capacity:
            return self._files[key]
        if key in self._files:
            self._files.pop(key).file.close()
        self._files[key] = set_aside(
            self._folder, capacity, f"{self._name}: {capacity:,} bytes for {key}", "use --offload-train-target cpu"
        )
        return self._files[key]

    def _run(
        self,
        what: str,
        nbytes: int,
        device: torch.device,
        work: Callable[[int, torch.Tensor, torch.cuda.Stream | None], None],
    ) -> None:
        """Cut `nbytes` into pieces of a slot's size and do `work(start, slot, stream)` for each, a thread a slot."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # whoever writes the source or still reads the target
        starts = iter(range(0, nbytes, self._slot_bytes))
        stop = threading.Event()

        def worker(slot: torch.Tensor) -> None:
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            for start in starts:
                if stop.is_set():
                    return
                work(start, slot, stream)

        futures = [self._pool.submit(worker, slot) for slot in self._slots]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # no thread is left at work on the tensors, whatever happens
            stop.set()
            wait(futures)
        try:
            for future in futures:
                future.result()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._name}: {what} in {self._folder} failed ({error.strerror}); "
                f"{shutil.disk_usage(self._folder).free:,} bytes are free there",
            ) from error


def _copy(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
    with torch.cuda.stream(stream):  # does nothing for None
        target.copy_(source, non_blocking=True)
    if stream is not None:
        stream.synchronize()


def prepare_folder(folder: Path) -> None:
    """Make a folder for the trainer's bytes. Raises ValueError where it is in memory or can't be made."""
    filesystem = filesystem_of(folder)
    if filesystem in IN_MEMORY:
        raise UserError(
            f"the folder for the trainer's memory on disk, {folder}, is in memory ({filesystem}): what is written "
            "there stays on the host. Set --offload-train-disk-dir to a folder on a local disk, or use "
            "--offload-train-target cpu without --stream-optimizer-state-to-disk"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder for the trainer's memory on disk, {folder}, can't be made ({error.strerror}): set "
            "--offload-train-disk-dir to one that can be written to"
        ) from error


def set_aside(folder: str, nbytes: int, what: str, other_remedy: str) -> DiskFile:
    """A new file without a name in `folder`, with room for `nbytes`, a multiple of BLOCK: all of them zeros.

    Raises ValueError where the disk has no room for them. The message begins with `what`, and says to choose another
    folder or to do `other_remedy`.
    """
    file = None
    try:
        # Asked first: setting aside takes all there is before it fails, from other ranks and jobs as well.
        if shutil.disk_usage(folder).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = DiskFile(tempfile.TemporaryFile(dir=folder, buffering=0), nbytes)
        if nbytes:
            os.posix_fallocate(file.file.fileno(), 0, nbytes)
            zeros = torch.frombuffer(mmap.mmap(-1, BLOCK), dtype=torch.uint8)  # page aligned
            file.direct = bypass_cache(file.file.fileno(), zeros)
    except OSError as error:
        if file is not None:
            file.file.close()
        raise UserError(
            f"{what} can't be set aside in {folder} ({error.strerror}), which has "
            f"{shutil.disk_usage(folder).free:,} bytes free: choose a folder with more room "
            f"(--offload-train-disk-dir), or {other_remedy}"
        ) from error
    return file


def bypass_cache(descriptor: int, block: torch.Tensor) -> bool:
    """Turn direct I/O on if the filesystem takes it, tried with one block at the file's start."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(descriptor, block.numpy(), 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def _aligned(nbytes: int) -> torch.Tensor:
    buffer = torch.empty(nbytes + BLOCK, dtype=torch.uint8)
    skip = -buffer.data_ptr() % BLOCK
    return buffer[skip : skip + nbytes]
