"""Reading Hugging Face safetensors checkpoints tensor by tensor into a Megatron model, and writing them as a stream."""

import json
import logging
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.utils import CHAT_TEMPLATE_DIR

from miles.backends.megatron_utils.hf.base import HEAD, Entry, Family
from miles.utils.errors import UserError
from miles.utils.export_folder import INDEX_FILE, WRITER, export_problem
from miles.weight_sync.parallel import ParallelInfo

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHOWN = 8


class CheckpointIndex:
    """Names, shapes and dtypes of a checkpoint, from the headers of its safetensors files; tensors are read one by one.

    folder: holds model.safetensors, or model.safetensors.index.json and the files that it names.
    shapes: {name: shape}; dtypes: {name: safetensors dtype such as "BF16"}.
    Raises ValueError where the folder has no such files, or the index and the files disagree.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._handles: dict[Path, safe_open] = {}
        listed = self._listed_names()
        for path, names in listed.items():
            header = _read_header(path)
            for name in header if names is None else names:
                if name not in header:
                    raise UserError(f"{self.folder / INDEX_FILE} says that {path.name} holds {name}, but it does not")
                self.files[name] = path
                self.shapes[name] = tuple(header[name]["shape"])
                self.dtypes[name] = header[name]["dtype"]

    def _listed_names(self) -> dict[Path, list[str] | None]:
        index, single = self.folder / INDEX_FILE, self.folder / SINGLE_FILE
        if index.is_file():
            files: dict[Path, list[str] | None] = {}
            for name, file in json.loads(index.read_text())["weight_map"].items():
                files.setdefault(self.folder / file, []).append(name)
            missing = [path.name for path in files if not path.is_file()]
            if missing:
                raise UserError(f"{index} names files that are not there: {_some(missing)}; download them again")
            return files
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

    def read(self, name: str) -> torch.Tensor:
        """One full tensor, mapped from its file: bytes are read when they are used, and no others."""
        path = self.files[name]
        if path not in self._handles:
            self._handles[path] = safe_open(path, framework="pt", device="cpu")
        return self._handles[path].get_tensor(name)

    def close(self, keep: Path | None = None) -> None:
        """Forget all files but `keep`: what was read of them leaves memory with the tensors. They open again by use."""
        self._handles = {path: handle for path, handle in self._handles.items() if path == keep}


def check_names_and_shapes(
    index: CheckpointIndex, entries: list[Entry], family: Family, hf_config: PreTrainedConfig
) -> None:
    """Compare all of a model's entries with the checkpoint. Raises ValueError with the names that differ.

    A tied head may be listed or not. `entries` are those of every pipeline stage.
    """
    wanted = {name: shape for entry in entries for name, shape in zip(entry.hf_names, entry.shapes, strict=True)}
    extra = {name for name in index.files if name not in wanted and not name.endswith(family.ignored_suffixes)}
    extra -= set(untrained_names(index, family, hf_config))
    if hf_config.tie_word_embeddings:
        extra.discard(HEAD)
    missing = [name for name in wanted if name not in index]
    shapes = [
        f"{name} {list(index.shapes[name])} in the checkpoint, {list(shape)} by config.json"
        for name, shape in wanted.items()
        if name in index and index.shapes[name] != tuple(shape)
    ]
    dtypes = [f"{name} {index.dtypes[name]}" for name in wanted if name in index and index.dtypes[name] not in DTYPES]
    faults = [
        f"{what}: {_some(names)}"
        for what, names in (
            ("missing", missing),
            ("not of this model", sorted(extra)),
            ("other shapes", shapes),
            (f"dtypes other than {', '.join(DTYPES)}", dtypes),
        )
        if names
    ]
    if faults:
        raise UserError(f"the weights in {index.folder} do not fit its config.json; " + "; ".join(faults))


def untrained_names(index: CheckpointIndex, family: Family, hf_config: PreTrainedConfig) -> list[str]:
    """The checkpoint's weights that its model has no use for."""
    prefixes = family.ignored_prefixes(hf_config)
    return [name for name in index.files if name.startswith(prefixes)]


def rounded_names(index: CheckpointIndex, own: list[tuple[Entry, list[torch.Tensor]]]) -> list[str]:
    """The weights of a half-precision checkpoint that it keeps in float32 and the model doesn't."""
    wide = [
        name
        for entry, parameters in own
        for name in entry.hf_names
        if index.dtypes[name] == "F32" and parameters[0].element_size() < torch.float32.itemsize
    ]
    return wide if any(dtype in ("F16", "BF16") for dtype in index.dtypes.values()) else []


def load_into(
    chunks: list[torch.nn.Module],
    family: Family,
    hf_config: PreTrainedConfig,
    folder: str | Path,
    parallel: ParallelInfo,
) -> int:
    """Fill this rank's part of the model from the checkpoint in `folder`; returns the number of parameters filled.

    chunks: the pipeline stage's GPTModels, unwrapped. Only the tensors of their layers and this rank's experts are
    read, file by file, so that at most one file and one parameter's tensors are in memory; values are cast to the
    parameters' dtypes.
    Raises ValueError where checkpoint and config.json differ in names or shapes, or the model has a parameter without a
    value, or a value has no parameter.
    """
    index = CheckpointIndex(folder)
    whole = family.entries(hf_config, range(hf_config.num_hidden_layers), True, True, parallel.ep_size)
    check_names_and_shapes(index, whole, family, hf_config)
    untrained = untrained_names(index, family, hf_config)
    if untrained:
        logger.info("not trained nor sent to engines, exported as they are: %s", _some(untrained))
    own: list[tuple[Entry, list[torch.Tensor]]] = []
    for number, chunk in enumerate(chunks):
        targets = model_tensors(chunk)
        held = held_entries(chunk_entries(family, hf_config, parallel, parallel.pp_rank, number), parallel)
        check_parameters(targets, [replace(entry, megatron_name=name) for entry, names in held for name in names])
        own += [(entry, [targets[name] for name in names]) for entry, names in held]
    rounded = rounded_names(index, own)
    if rounded:
        logger.warning(
            "%d weights are float32 in a checkpoint of other types, and rounded to the model's type: %s",
            len(rounded),
            _some(rounded),
        )
    place = {path: number for number, path in enumerate(dict.fromkeys(index.files.values()))}

    def last_file(entry: Entry) -> Path:
        return max((index.files[name] for name in entry.hf_names), key=place.__getitem__)

    for entry, tensors in sorted(own, key=lambda item: place[last_file(item[0])]):
        _fill(entry, tensors, index, parallel)
        index.close(keep=last_file(entry))
    index.close()
    return sum(len(tensors) for _, tensors in own)


@torch.no_grad()
def _fill(entry: Entry, targets: list[torch.Tensor], index: CheckpointIndex, parallel: ParallelInfo) -> None:
    values = [index.read(name) for name in entry.hf_names]
    if entry.stacked:
        values = [value.narrow(0, parallel.ep_rank * len(targets), len(targets)) for value in values]
    rank, size = _place(entry, parallel)
    value = entry.kind.split(values, rank, size)
    for target, own in zip(targets, value if entry.stacked else [value], strict=True):
        if own.shape != target.shape:
            raise UserError(
                f"{entry.megatron_name} has shape {list(target.shape)} in the model and {list(own.shape)} from "
                f"{', '.join(entry.hf_names)} at {'expert ' if entry.is_expert else ''}tensor parallel size {size}"
            )
        target.copy_(own)


def _place(entry: Entry, parallel: ParallelInfo) -> tuple[int, int]:
    """The rank and size of the tensor parallelism that cuts an entry."""
    return (parallel.etp_rank, parallel.etp_size) if entry.is_expert else (parallel.tp_rank, parallel.tp_size)


def chunk_entries(
    family: Family, hf_config: PreTrainedConfig, parallel: ParallelInfo, stage: int, chunk: int
) -> list[Entry]:
    """What a chunk of a pipeline stage's model has, the experts of all ranks included."""
    layers = parallel.chunk_layers[stage][chunk]
    first, last = (stage, chunk) == (0, 0), (stage + 1, chunk + 1) == (parallel.pp_size, len(parallel.chunk_layers[0]))
    return family.entries(hf_config, layers, first, last, parallel.ep_size)


def held_entries(entries: list[Entry], parallel: ParallelInfo) -> list[tuple[Entry, list[str]]]:
    """The entries of which this rank has something, and the names of its parameters: several where experts stack."""
    held = []
    for entry in entries:
        if entry.stacked:
            experts = entry.shapes[0][0] // parallel.ep_size
            held.append((entry, [entry.megatron_name.format(expert) for expert in range(experts)]))
        elif entry.ep_rank in (None, parallel.ep_rank):
            held.append((entry, [entry.megatron_name]))
    return held


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a stage's model, by name (Megatron's _extra_state is no weight)."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
    }


def check_parameters(targets: dict[str, torch.Tensor], entries: list[Entry]) -> None:
    """Each parameter of the stage has exactly one entry. Raises ValueError with the names that differ."""
    named = [entry.megatron_name for entry in entries]
    assert len(set(named)) == len(named), "an entry list names a parameter twice"
    without_value, without_parameter = sorted(targets.keys() - set(named)), sorted(set(named) - targets.keys())
    if without_value or without_parameter:
        raise UserError(
            f"the Megatron model and its family's entries differ: parameters without a value: {_some(without_value)}; "
            f"values without a parameter: {_some(without_parameter)}"
        )


class HFWriter:
    """Writes a stream of (name, tensor) as a safetensors checkpoint that transformers loads; a context manager.

    folder: the finished checkpoint. It appears at the end, whole: until then the files are in `.<name>.partial` beside
    it. An older export of ours at that place is replaced; any other folder is refused with ValueError.
    source: the checkpoint from which all else is copied: configuration, tokenizer, chat templates, code. config.json
    says the dtype of most written numbers.
    max_shard_bytes: a file is closed before it would grow beyond this (one larger tensor has a file of its own).
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

    def __enter__(self) -> "HFWriter":
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
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
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)  # where it became the finished one, it is gone

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
        self._copy_the_rest()
        self._write_config()
        metadata = {"total_size": self.bytes_written, "writer": WRITER}
        (self.partial / INDEX_FILE).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2))
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.partial.rename(self.folder)

    def _copy_the_rest(self) -> None:
        """What transformers reads beside the weights, whatever its tokenizer's and its code's files are called."""
        for path in self.source.iterdir():
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_ENDINGS):
                shutil.copyfile(path, self.partial / path.name)
        if (self.source / CHAT_TEMPLATE_DIR).is_dir():
            shutil.copytree(self.source / CHAT_TEMPLATE_DIR, self.partial / CHAT_TEMPLATE_DIR)

    def _write_config(self) -> None:
        config = json.loads((self.source / "config.json").read_text())
        dtype = str(max(DTYPES.values(), key=self._elements.__getitem__)).removeprefix("torch.")
        for part in (config, config.get("text_config")):
            if part is not None:
                part.pop("torch_dtype", None)
                part["dtype"] = dtype
        file = self.partial / "config.json"
        file.write_text(json.dumps(config, indent=2) + "\n")
        # safetensors makes its files for their owner alone: they get what the umask gives to others.
        for path in self.partial.glob("*.safetensors"):
            path.chmod(file.stat().st_mode)


# Of weights in any format, and of their indices. All other files of a checkpoint's folder are exported with it.
_WEIGHT_ENDINGS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ot", ".npz", ".onnx", ".onnx_data"),
    ".index.json",
)


def _read_header(path: Path) -> dict[str, dict]:
    """A safetensors header: 8 bytes of length (little-endian), then JSON (github.com/huggingface/safetensors)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:
            raise UserError(f"{path} is not a whole safetensors file: download it again")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in header.values()]
    if path.stat().st_size != 8 + length + max(ends, default=0):
        raise UserError(f"{path} is cut off or damaged: its header and its size differ; download it again")
    return header


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "") if names else "none"
