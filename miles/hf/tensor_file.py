"""Writing a safetensors file tensor by tensor: it may be larger than memory."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch


@dataclass(frozen=True)
class TensorInfo:
    """A tensor before it has values: safetensors' name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element, by the bits in the dtype's name."""
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) // 8 if bits else 1


def file_header(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """What a file of these tensors says of each: wider elements come first, so that each is aligned."""
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        start, end = end, end + prod(info.shape) * info.itemsize
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [start, end]}
    return header


class TensorFile:
    """A file whose tensors are known before they have values, written in any order; a context manager.

    It appears under its name once all are written: beside it is then no `.partial`.

    Args:
        path: of the file.
        tensors: all of them.
        metadata: texts for its header.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]):
        self.path, self._partial = path, path.with_name(path.name + ".partial")
        self._header = file_header(tensors)
        text = json.dumps({"__metadata__": dict(metadata), **self._header}).encode()
        text += b" " * (-len(text) % 8)
        self._first_byte = 8 + len(text)
        self._missing = set(tensors)
        self._file = self._partial.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> "TensorFile":
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one of the tensors, once."""
        start, end = self._header[name]["data_offsets"]
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        assert (list(tensor.shape), data.nbytes) == (self._header[name]["shape"], end - start), name
        self._missing.remove(name)
        self._file.seek(self._first_byte + start)
        self._file.write(memoryview(data))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is not None:
            self._partial.unlink()
            return
        assert not self._missing, f"never written: {sorted(self._missing)}"
        self._partial.rename(self.path)
