"""A file of fp32 masters and Adam moments that is read, changed and written back bucket by bucket.

The state is a line of `elements` positions. Each kind of value (master, first moment, second moment, scales) has an
area of the file, in position order; a bucket is the same stretch of every area. Buckets are equally long.

Moments may be stored in a narrower format than fp32. It has one fp32 scale for every NEIGHBOURS values in a row. Of
the second moment it keeps the root, whose exponents span half the range. It rounds at random, up or down so that the
expected value is right: a moment moves by a share of 1 - beta a step, often less than half the distance of two codes,
and rounding to the nearest would freeze it. What is drawn depends on the position and the step, not on the buckets. A
second moment, which divides, is zero only if it was.
"""

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from miles.residency.disk_store import BLOCK, prepare_folder, round_up, set_aside
from miles.residency.pinned import HostBuffer
from miles.utils.errors import UserError

MOMENT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8e4m3": torch.float8_e4m3fn,
    "fp8e5m2": torch.float8_e5m2,
}
NEIGHBOURS = 256  # that share a scale
_GRAIN = 4096  # elements; with it every area of a bucket but the scales is whole blocks of the disk in every format
SLOTS = 3  # one is read, one is worked on, one is written
_MAP_NORESERVE = 0x4000  # mmap has no name for it before Python 3.13


def encode(
    values: torch.Tensor, dtype: torch.dtype, root: bool, seed: int, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`values` (fp32, flat, a multiple of NEIGHBOURS long) as codes of `dtype` and an fp32 scale a row.

    They lie at `start`, another multiple, of the positions; a position and a `seed` always draw the same.

    The error of a value (of its root, with `root`) is less than the distance of two codes there: the value times
    `finfo(dtype).eps`, but at least `scale` times the format's smallest number.
    """
    info = torch.finfo(dtype)
    top = 1.0 if dtype == torch.bfloat16 else info.max
    smallest = max(info.smallest_normal * info.eps, torch.finfo(torch.float32).tiny)
    rows = (values.sqrt() if root else values).view(-1, NEIGHBOURS)
    # Powers of two: what was decoded is encoded to the same value again.
    mantissas, exponents = torch.frexp(rows.abs().amax(dim=1) / top)
    scales = _power_of_two(exponents - (mantissas == 0.5).int())
    rows = rows / scales[:, None]
    steps = (_power_of_two(torch.frexp(rows).exponent - 1) * info.eps).clamp_(min=smallest)
    counts = rows / steps
    below = counts.floor()
    draws = _draws(seed, start // NEIGHBOURS, len(rows), rows.device)
    rounded = ((below + (draws < counts - below)) * steps).clamp_(-top, top)
    if root:
        rounded = torch.where(rows > 0, rounded.clamp(min=smallest), rounded)
    return rounded.to(dtype).flatten(), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, root: bool) -> torch.Tensor:
    """What `encode` was given, in fp32, flat, up to its error."""
    values = codes.float().view(-1, NEIGHBOURS) * scales[:, None]
    return (values.square_() if root else values).flatten()


def _draws(seed: int, first_row: int, rows: int, device: torch.device) -> torch.Tensor:
    """Uniform in [0, 1), fp32 [rows, NEIGHBOURS], each a hash of seed, row and column. Repeats after 2^31 rows."""
    bits = (torch.arange(first_row, first_row + rows, device=device) & 0x7FFFFFFF).int()
    bits = _mixed(bits ^ _mixed(torch.tensor(seed & 0x7FFFFFFF, dtype=torch.int32, device=device)))
    bits = _mixed(bits[:, None] ^ torch.arange(NEIGHBOURS, dtype=torch.int32, device=device))
    return bits.bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """`bits` (int32) mixed in place by the hash lowbias32 of https://nullprogram.com/blog/2018/07/31."""
    # A shift to the right repeats the sign, which the mask takes off.
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x7FEB352D
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= 0x846CA68B - 2**32
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    # Exactly, which pow and ldexp are not. -126 is the least exponent of normal numbers.
    return (exponents.clamp(-126, 127) + 127 << 23).view(torch.float32)


@dataclass(frozen=True)
class _Area:
    """One kind of value: `bucket_bytes` of each bucket, of which the first hold `bucket_elements` of `dtype`."""

    dtype: torch.dtype
    bucket_elements: int
    file_offset: int
    slot_offset: int
    bucket_bytes: int

    def in_slot(self, slot: torch.Tensor) -> torch.Tensor:
        return slot[self.slot_offset :][: self.bucket_bytes]


@dataclass
class Bucket:
    """The values of one bucket, flat, as views of a slot: what is written to them goes back to the file."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    masters: torch.Tensor | None = None
    exp_avg_scales: torch.Tensor | None = None
    exp_avg_sq_scales: torch.Tensor | None = None

    def masters_at(self, place: slice) -> torch.Tensor:
        """Of a shard that has fp32 weights of its own: they are at this place of the bucket."""
        assert self.masters is not None, "no shard has fp32 weights of its own"
        return self.masters[place]

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments in fp32: the views themselves where they are stored so."""
        if self.exp_avg_scales is None or self.exp_avg_sq_scales is None:
            return self.exp_avg, self.exp_avg_sq
        return (
            decode(self.exp_avg, self.exp_avg_scales, root=False),
            decode(self.exp_avg_sq, self.exp_avg_sq_scales, root=True),
        )

    def store_moments(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, seed: int, start: int) -> None:
        """Keep what `moments` gave out and the caller changed. seed, start: as in `encode`; start is the bucket's."""
        if self.exp_avg_scales is None or self.exp_avg_sq_scales is None:
            assert exp_avg is self.exp_avg and exp_avg_sq is self.exp_avg_sq
            return
        for values, root, codes, scales in (
            (exp_avg, False, self.exp_avg, self.exp_avg_scales),
            (exp_avg_sq, True, self.exp_avg_sq, self.exp_avg_sq_scales),
        ):
            new_codes, new_scales = encode(values, codes.dtype, root, 2 * seed + root, start)
            codes.copy_(new_codes)
            scales.copy_(new_scales)


class StateFile:
    """A file without a name in `folder`: it vanishes with the process, however that ends. Zeros at first.

    Args:
        elements: positions.
        masters: whether masters are kept as well as moments.
        moment_dtype: format of the moments on disk.
        chunk_bytes: host memory for SLOTS buckets.
        pinned: whether that memory is pinned.

    Raises:
        ValueError: the chunk is too small, the disk or the host's memory too full, or the folder is in memory.
    """

    def __init__(
        self, folder: str, elements: int, masters: bool, moment_dtype: torch.dtype, chunk_bytes: int, pinned: bool
    ):
        # kind -> (format, neighbours that share one)
        kinds = {"exp_avg": (moment_dtype, 1), "exp_avg_sq": (moment_dtype, 1)}
        if masters:
            kinds = {"masters": (torch.float32, 1)} | kinds
        if moment_dtype != torch.float32:
            kinds |= {"exp_avg_scales": (torch.float32, NEIGHBOURS), "exp_avg_sq_scales": (torch.float32, NEIGHBOURS)}

        def area_bytes(bucket_elements: int) -> list[int]:
            return [round_up(bucket_elements // sharing * dtype.itemsize, BLOCK) for dtype, sharing in kinds.values()]

        slot_bytes, grain_bytes = chunk_bytes // SLOTS, sum(area_bytes(_GRAIN))
        if slot_bytes < grain_bytes:
            raise UserError(
                f"a chunk of {chunk_bytes} bytes is too small to stream the optimizer state through, it takes at least "
                f"{SLOTS * grain_bytes}: raise --offload-train-disk-chunk-mb"
            )
        most = slot_bytes // grain_bytes * _GRAIN
        self.buckets = max(1, -(-elements // most))
        self.bucket_elements = round_up(-(-elements // self.buckets), _GRAIN)
        self._areas: dict[str, _Area] = {}
        file_offset = slot_offset = 0
        for (name, (dtype, sharing)), nbytes in zip(kinds.items(), area_bytes(self.bucket_elements), strict=True):
            self._areas[name] = _Area(dtype, self.bucket_elements // sharing, file_offset, slot_offset, nbytes)
            file_offset += self.buckets * nbytes
            slot_offset += nbytes
        self.nbytes = file_offset
        self.slot_bytes = slot_offset
        prepare_folder(Path(folder))
        what = f"{self.nbytes:,} bytes for the optimizer state of a rank"
        self._file = set_aside(folder, self.nbytes, what, "drop --stream-optimizer-state-to-disk")
        staging = HostBuffer(SLOTS * self.slot_bytes, pinned, remedy="lower --offload-train-disk-chunk-mb")
        self._slots = list(staging.tensor.split(self.slot_bytes))

    def bucket(self, slot: torch.Tensor) -> Bucket:
        """`slot` (uint8, slot_bytes long, on any device) as values."""
        views = {
            name: area.in_slot(slot)[: area.bucket_elements * area.dtype.itemsize].view(area.dtype)
            for name, area in self._areas.items()
        }
        return Bucket(**views)

    def stream(self, update: Callable[[int, torch.Tensor], Callable[[], object]]) -> None:
        """Take every bucket through `update(index, slot)` and back to the file; others are read and written meanwhile.

        `update` returns a function that waits until the slot (uint8, on the host) holds what is to be written.

        Raises:
            OSError: the disk failed; buckets before and after it may have been written.
        """
        writes: list[Future | None] = [None] * SLOTS
        # Leaving the block waits for what was begun, also when something failed.
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            reading = reader.submit(self._read, 0, None)
            for index in range(self.buckets):
                slot = reading.result()
                if index + 1 < self.buckets:
                    reading = reader.submit(self._read, index + 1, writes[(index + 1) % SLOTS])
                writes[index % SLOTS] = writer.submit(self._write, index, slot, update(index, slot))
            for write in writes:
                if write is not None:
                    write.result()

    def mapped(self) -> Bucket:
        """The whole file as host tensors of all positions, read page by page as they are used; writes don't reach it.

        Valid until the next `stream`.
        """
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        pages = mmap.mmap(self._file.file.fileno(), self.nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        views = {}
        for name, area in self._areas.items():
            rows = whole[area.file_offset :][: self.buckets * area.bucket_bytes].view(self.buckets, area.bucket_bytes)
            used = area.bucket_elements * area.dtype.itemsize
            # A view but for the scales, whose last block of each bucket is padded.
            views[name] = rows[:, :used].reshape(-1).view(area.dtype)
        return Bucket(**views)

    def _read(self, index: int, slot_is_free: Future | None) -> torch.Tensor:
        if slot_is_free is not None:
            slot_is_free.result()
        slot = self._slots[index % SLOTS]
        for area in self._areas.values():
            self._file.read(area.in_slot(slot), area.file_offset + index * area.bucket_bytes)
        return slot

    def _write(self, index: int, slot: torch.Tensor, wait: Callable[[], object]) -> None:
        wait()
        for area in self._areas.values():
            self._file.write(area.in_slot(slot), area.file_offset + index * area.bucket_bytes)
