"""Reading Hugging Face safetensors checkpoints, tensor by tensor."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from miles.hf.block_formats import Quantised, block_formats, find_quantised
from miles.hf.quantization import quantization_in
from miles.utils.errors import UserError
from miles.utils.export_folder import INDEX_FILE

SINGLE_FILE = "model.safetensors"
# I64: DeepSeek-V4's tables of experts.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
SHOWN = 8


class CheckpointIndex:
    """Names, shapes and dtypes of a checkpoint, from the headers of its safetensors files; tensors are read one by one.

    A quantised weight is listed, and read, as the bf16 weight that it stands for; its codes and scales are not.

    Args:
        folder: holds model.safetensors, or model.safetensors.index.json and the files that it names, and config.json
            where weights are quantised.

    Attributes:
        files: {name: the file that holds it}; of a quantised weight the one with its codes.
        shapes: {name: shape}.
        dtypes: {name: safetensors dtype such as "BF16"}.
        quantised: {name: how it is stored} of the quantised ones.

    Raises:
        ValueError: the folder has no such files, or the index and the files disagree, or codes and scales do.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._handles: dict[Path, safe_open] = {}
        listed = self._listed_names()
        for path, names in listed.items():
            header = read_header(path)
            header.pop("__metadata__", None)
            for name in header if names is None else names:
                if name not in header:
                    raise UserError(f"{self.folder / INDEX_FILE} says that {path.name} holds {name}, but it does not")
                self.files[name] = path
                self.shapes[name] = tuple(header[name]["shape"])
                self.dtypes[name] = header[name]["dtype"]
        formats = block_formats(quantization_in(self.folder))
        self.quantised: dict[str, Quantised] = find_quantised(formats, self.dtypes, self.shapes)
        self._stored = dict(self.files)
        self._hide_codes()

    def _hide_codes(self) -> None:
        for name, stored in self.quantised.items():
            file = self.files[stored.codes]
            for tensor in (stored.codes, stored.scales):
                del self.files[tensor], self.shapes[tensor], self.dtypes[tensor]
            self.files[name], self.shapes[name], self.dtypes[name] = file, stored.shape, "BF16"

    def _listed_names(self) -> dict[Path, list[str] | None]:
        index, single = self.folder / INDEX_FILE, self.folder / SINGLE_FILE
        if index.is_file():
            files: dict[Path, list[str]] = {}
            for name, file in json.loads(index.read_text())["weight_map"].items():
                files.setdefault(self.folder / file, []).append(name)
            missing = [path.name for path in files if not path.is_file()]
            if missing:
                raise UserError(f"{index} names files that are not there: {some_of(missing)}; download them again")
            return {**files}
        if single.is_file():
            return {single: None}
        raise UserError(
            f"{self.folder} has neither {INDEX_FILE} nor {SINGLE_FILE}: give the folder of a safetensors checkpoint "
            "(save_pretrained writes one)"
        )

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __len__(self) -> int:
        return len(self.files)

    def read(
        self,
        name: str,
        part: slice = slice(None),
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """One tensor. It is mapped from its file: bytes are read when they are used, and no others.

        Args:
            name: of the tensor.
            part: of its dimension 0; of a quantised weight, of the matrices in a stack of them.
            dtype: to which the values of a quantised weight are rounded; others come as they are stored.
            device: where they are computed; others are mapped on the host.
        """
        stored = self.quantised.get(name)
        if stored is None:
            tensor = self._map(name)
            return tensor if part == slice(None) else tensor[part]
        codes, scales = self._map(stored.codes), self._map(stored.scales)
        if part != slice(None):
            assert len(stored.shape) > 2, f"{name} is no stack of matrices"
            codes, scales = codes[part], scales[part]
        return stored.block_format.decode(codes.to(device), scales, dtype)

    def files_of(self, name: str) -> set[Path]:
        """The files that a tensor is read from: of a quantised weight, codes and scales may lie apart."""
        stored = self.quantised.get(name)
        return {self._stored[part] for part in ((name,) if stored is None else (stored.codes, stored.scales))}

    def _map(self, name: str) -> torch.Tensor:
        path = self._stored[name]
        if path not in self._handles:
            self._handles[path] = safe_open(path, framework="pt", device="cpu")
        return self._handles[path].get_tensor(name)

    def close(self, keep: Path | None = None) -> None:
        """Forget all files but `keep`: what was read of them leaves memory with the tensors. They open again by use."""
        self._handles = {path: handle for path, handle in self._handles.items() if path == keep}


def read_header(path: Path) -> dict[str, dict]:
    """A safetensors header, with its `__metadata__`: 8 bytes of length (little-endian), then JSON.

    Args:
        path: of a safetensors file (github.com/huggingface/safetensors).

    Raises:
        ValueError: it is not whole.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:
            raise UserError(f"{path} is not a whole safetensors file: download it again")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if path.stat().st_size != 8 + length + max(ends, default=0):
        raise UserError(f"{path} is cut off or damaged: its header and its size differ; download it again")
    return header


def some_of(names: list[str]) -> str:
    """The first of them, and how many more there are, in one line."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "") if names else "none"
