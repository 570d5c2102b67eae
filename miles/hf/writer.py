"""Writing Hugging Face safetensors checkpoints as a stream of tensors."""

import json
import shutil
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import CHAT_TEMPLATE_DIR

from miles.hf.checkpoint import DTYPES
from miles.utils.errors import UserError
from miles.utils.export_folder import INDEX_FILE, WRITER, export_problem


class HFWriter:
    """Writes a stream of (name, tensor) as a safetensors checkpoint that transformers loads.

    `write` each tensor, then `finish`, or `discard` what was written; as a context manager it does the one of the two
    that is due at the end. Until then the files are in `.<name>.partial` beside the folder.

    Args:
        folder: the finished checkpoint, which appears at the end, whole. An older export of ours there is replaced.
        source: the checkpoint from which all else is copied: configuration, tokenizer, chat templates, code.
            config.json says the dtype of most written numbers.
        max_shard_bytes: a file is closed before it would grow beyond this (one larger tensor has a file of its own).

    Raises:
        ValueError: another folder is there.
    """

    def __init__(self, folder: str | Path, source: str | Path, max_shard_bytes: int = 5 * 1024**3):
        self.folder, self.source = Path(folder), Path(source)
        self.max_shard_bytes = max_shard_bytes
        if problem := export_problem(self.folder):
            raise UserError(problem)
        self.partial = self.folder.parent / f".{self.folder.name}.partial"
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self._elements: Counter[torch.dtype] = Counter()
        self.bytes_written = 0
        self._finished = False
        self.discard()
        self.partial.mkdir(parents=True)

    def __enter__(self) -> "HFWriter":
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor. It is copied: the caller may change it afterwards."""
        if name in self._names:
            raise UserError(f"{name} was written twice")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_shard_bytes:
            self._flush()
        self._names.add(name)
        self._elements[tensor.dtype] += tensor.numel()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        elif not self._finished:
            self.finish()

    def finish(self) -> None:
        """Write the rest, and make it the checkpoint. Nothing is left of one that fails here."""
        try:
            self._finish()
            self._finished = True
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what was written; a finished checkpoint stays."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _flush(self) -> None:
        save_file(self._pending, self.partial / f"{len(self._shards)}.safetensors", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self.bytes_written += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        self._flush()
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self.partial / f"{number}.safetensors").rename(self.partial / file)
            weight_map.update(dict.fromkeys(names, file))
        copy_all_but_weights(self.source, self.partial)
        kinds = (kind for kind in DTYPES.values() if kind.is_floating_point)
        dtype = max(kinds, key=self._elements.__getitem__)
        write_config(self.source, self.partial, str(dtype).removeprefix("torch."))
        metadata = {"total_size": self.bytes_written, "writer": WRITER}
        (self.partial / INDEX_FILE).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2))
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.partial.rename(self.folder)


def copy_all_but_weights(source: Path, folder: Path) -> None:
    """Copy what transformers reads beside the weights, whatever its tokenizer's and its code's files are called."""
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_ENDINGS):
            shutil.copyfile(path, folder / path.name)
    if (source / CHAT_TEMPLATE_DIR).is_dir():
        shutil.copytree(source / CHAT_TEMPLATE_DIR, folder / CHAT_TEMPLATE_DIR, dirs_exist_ok=True)


def write_config(source: Path, folder: Path, dtype: str | None, quantization: dict[str, Any] | None = None) -> None:
    """Write the source's config.json for the weights in `folder`, with their file mode.

    Args:
        source: of the checkpoint that config.json is taken from.
        folder: with its safetensors files in it.
        dtype: of most weights, such as "bfloat16"; None leaves what the source says.
        quantization: how others are stored; None if they are as they are.
    """
    config = json.loads((source / "config.json").read_text())
    for part in (config, config.get("text_config")):
        if part is not None:
            for key in _OF_STORED_WEIGHTS:
                part.pop(key, None)
            if dtype is not None:
                part.pop("torch_dtype", None)
                part["dtype"] = dtype
    if quantization is not None:
        config["quantization_config"] = quantization
    file = folder / "config.json"
    file.write_text(json.dumps(config, indent=2) + "\n")
    # safetensors makes its files for their owner alone: they get what the umask gives to others.
    for path in folder.glob("*.safetensors"):
        path.chmod(file.stat().st_mode)


# Of config.json: what it says of the weights in the source. Written are plain ones.
_OF_STORED_WEIGHTS = ("quantization_config", "compression_config", "expert_dtype")
# Of weights in any format, and of their indices. All other files of a checkpoint's folder are exported with it.
_WEIGHT_ENDINGS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ot", ".npz", ".onnx", ".onnx_data"),
    ".index.json",
)
