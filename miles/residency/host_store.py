"""Host memory as the place where a trainer's contents go while its device memory is away."""

import logging
from typing import Protocol

import torch

from miles.residency.pinned import HostBuffer
from miles.residency.plan import Place
from miles.utils.units import GB

logger = logging.getLogger(__name__)


class Store(Protocol):
    """Keeps the contents of flat uint8 device tensors, by key."""

    place: Place

    def save(self, key: str, source: torch.Tensor) -> None:
        """Copy `source` in, over what the key held; complete on return. On any error `source` is unharmed.

        Raises:
            ValueError: there is no room; raised before anything is copied.
            OSError: a disk failed midway; the key holds nothing then.
        """
        ...

    def load(self, key: str, target: torch.Tensor) -> None:
        """Copy the key's bytes into `target`, as large as what was saved; complete on return. The key keeps them."""
        ...

    def read(self, key: str, offset: int, nbytes: int) -> torch.Tensor:
        """Part of the key's bytes as uint8 on the host: maybe a view, so don't write to it."""
        ...

    def discard(self, key: str) -> None:
        """The key's contents are no longer needed: give host memory back, where that is the store's way."""
        ...


class HostStore:
    """A host buffer a key, exactly as big as its contents; `pinned` for copies at the speed of the link.

    With `keep` a buffer stays for the next cycle once it is there, since pinning takes five to ten times as long as the
    copy; else `discard` gives it back. `remedy` is what a user can do where the host has no room.
    """

    place = Place.HOST

    def __init__(self, pinned: bool, keep: bool, remedy: str):
        self._pinned = pinned
        self._keep = keep
        self._remedy = remedy
        self._buffers: dict[str, HostBuffer] = {}
        self._complete: set[str] = set()

    def save(self, key: str, source: torch.Tensor) -> None:
        check_flat(source)
        self._complete.discard(key)
        if key in self._buffers and len(self._buffers[key].tensor) != len(source):
            self._free(key)  # first, so that the host never holds both
        if key not in self._buffers:
            self._buffers[key] = HostBuffer(len(source), self._pinned, self._remedy)
            if self._keep:
                logger.info(
                    "%.2f GB of host memory for %s stay when it is back on the GPU, for the next sleep; "
                    "--no-offload-train-keep-host-buffers gives them back each time", len(source) / GB, key,
                )  # fmt: skip
        _copy(self._buffers[key].tensor, source)
        self._complete.add(key)

    def load(self, key: str, target: torch.Tensor) -> None:
        check_flat(target)
        contents = self._contents(key)
        assert len(contents) == len(target), f"{key} holds {len(contents):,} bytes, the target {len(target):,}"
        _copy(target, contents)

    def read(self, key: str, offset: int, nbytes: int) -> torch.Tensor:
        contents = self._contents(key)
        assert 0 <= offset <= offset + nbytes <= len(contents), f"{key}: {offset} + {nbytes} of {len(contents)} bytes"
        return contents[offset : offset + nbytes]

    def discard(self, key: str) -> None:
        if not self._keep and key in self._buffers:
            self._complete.discard(key)
            self._free(key)

    def _contents(self, key: str) -> torch.Tensor:
        assert key in self._complete, f"nothing is saved under {key!r}"
        return self._buffers[key].tensor

    def _free(self, key: str) -> None:
        self._buffers.pop(key).free()


def check_flat(tensor: torch.Tensor) -> None:
    """Assert what `Store` takes: a flat, contiguous uint8 tensor."""
    assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous(), (tensor.dtype, tensor.shape)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    # On the current stream, so after the kernels that write the source or still read the target.
    target.copy_(source, non_blocking=True)
    if target.is_cuda or source.is_cuda:
        torch.cuda.current_stream(target.device if target.is_cuda else source.device).synchronize()
