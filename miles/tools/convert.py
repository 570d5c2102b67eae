"""Converts a checkpoint's weights: quantised ones to bf16, or bf16 ones to FP8 in blocks of 128 x 128.

Nothing needs it: trainers read quantised checkpoints as they are. Several files are converted side by side, each tensor
by tensor. A run that was ended goes on with the same command: files that are whole are kept.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from miles.hf.checkpoint import CheckpointIndex, read_header
from miles.hf.fp8 import SCALES, fp8_config, fp8_weights, quantise
from miles.hf.tensor_file import TensorFile, TensorInfo, file_header
from miles.hf.writer import copy_all_but_weights, write_config
from miles.tools import run
from miles.utils.errors import UserError
from miles.utils.export_folder import INDEX_FILE, WRITER


def convert(input: Path, output: Path, to: Literal["bf16", "fp8"], jobs: int = 4) -> None:
    """Write a checkpoint with the same tensors in another format.

    Args:
        input: folder of the checkpoint.
        output: folder to write, which must not exist yet; until all is written it is called .NAME.partial.
        to: bf16 for a quantised checkpoint (FP8 blocks, FP4, MXFP4), fp8 for one in bf16, fp16 or fp32.
        jobs: files that are converted side by side.

    Raises: ValueError if the checkpoint has nothing to convert, or the folder is there.
    """
    if output.exists():
        raise UserError(f"--output {output} exists: name another folder, or remove it")
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: give 1 or more")
    conversion = Conversion(CheckpointIndex(input), to)
    partial = output.parent / f".{output.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    # Torch has a processor's cores for each thread otherwise.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    with ThreadPoolExecutor(jobs) as pool:
        for line in pool.map(lambda file: conversion.write(file, partial), conversion.files):
            print(line, flush=True)
    conversion.finish(partial)
    partial.rename(output)
    print(f"wrote {output}: {len(conversion.tensors)} tensors in {len(conversion.files)} files")


class Conversion:
    """One checkpoint's way to another format.

    Args:
        index: of the checkpoint.
        to: the format.

    Attributes:
        files: {name of a file: names of the tensors of `index` that it gets}.
        tensors: {name: what is written}.

    Raises:
        ValueError: there is nothing to convert, or another format would be needed.
    """

    def __init__(self, index: CheckpointIndex, to: Literal["bf16", "fp8"]):
        self.index, self.to = index, to
        if to == "bf16" and not index.quantised:
            raise UserError(f"--input {index.folder} has no quantised weights: there is nothing to convert to bf16")
        if to == "fp8" and index.quantised:
            raise UserError(f"--input {index.folder} is quantised, and would lose twice: give the bf16 checkpoint")
        self.fp8 = fp8_weights(index) if to == "fp8" else set()
        self.files: dict[str, list[str]] = {}
        for name, path in sorted(index.files.items(), key=lambda item: item[1]):
            self.files.setdefault(path.name, []).append(name)
        self.tensors = {new: info for name in index.files for new, info in self._written(name).items()}

    def _written(self, name: str) -> dict[str, TensorInfo]:
        """What is written for a tensor of the checkpoint."""
        info = TensorInfo(self.index.dtypes[name], self.index.shapes[name])
        if name not in self.fp8:
            return {name: info}
        codes, scales = quantise(torch.empty(info.shape, device="meta"))
        shapes = {name: ("F8_E4M3", codes.shape), name + SCALES: ("F32", scales.shape)}
        return {new: TensorInfo(dtype, tuple(shape)) for new, (dtype, shape) in shapes.items()}

    def _values(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        tensor = self.index.read(name)
        if name not in self.fp8:
            yield name, tensor
            return
        if not tensor.isfinite().all():
            raise UserError(f"{name} of {self.index.folder} has values that are not finite")
        yield from zip((name, name + SCALES), quantise(tensor), strict=True)

    def write(self, file: str, folder: Path) -> str:
        """Write one file, unless it is there; returns what to say of it."""
        tensors = {new: info for name in self.files[file] for new, info in self._written(name).items()}
        converted = sum(name in self.fp8 or name in self.index.quantised for name in self.files[file])
        metadata = {"format": "pt", "converted_to": self.to, "made_from": self._source(file)}
        if _is_there(folder / file, tensors, metadata):
            return f"{file}: kept"
        with TensorFile(folder / file, tensors, metadata) as output:
            for name in self.files[file]:
                for new, tensor in self._values(name):
                    output.write(new, tensor)
        return f"{file}: {len(self.files[file])} tensors, {converted} of them converted"

    def _source(self, file: str) -> str:
        """The state of all files that tensors of `file` are read from: those of another state don't fit to it."""
        paths = {path for name in self.files[file] for path in self.index.files_of(name)}
        states = [(path, path.stat()) for path in sorted(paths)]
        return "; ".join(f"{path.absolute()} {state.st_size} {state.st_mtime_ns}" for path, state in states)

    def finish(self, folder: Path) -> None:
        """Write all that is beside the weights, the index last."""
        for path in folder.iterdir():
            if path.suffix in (".safetensors", ".partial") and path.name not in self.files:
                path.unlink()  # of a run with another checkpoint
        copy_all_but_weights(self.index.folder, folder)
        if self.fp8:
            write_config(self.index.folder, folder, None, fp8_config(self.index, self.fp8))
        else:
            write_config(self.index.folder, folder, "bfloat16")
        weight_map = {new: file for file, names in self.files.items() for name in names for new in self._written(name)}
        size = sum(read["data_offsets"][1] - read["data_offsets"][0] for read in file_header(self.tensors).values())
        index = {"metadata": {"total_size": size, "writer": WRITER}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _is_there(path: Path, tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> bool:
    """Whether a file is whole and would be written the same."""
    try:
        header = read_header(path)
    except (FileNotFoundError, UserError):
        return False
    return header.pop("__metadata__", None) == metadata and header == file_header(tensors)


if __name__ == "__main__":
    run(convert, __doc__)
