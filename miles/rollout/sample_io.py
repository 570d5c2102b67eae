"""Samples in files: a header line, then one sample a line, as JSON; compressed where the name ends in .gz.

The header is {"format": "miles-samples", "version": 1} and the fields of `Header`, a sample `Sample.to_dict()`. Reading
gives back exactly what was written.
"""

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import quote

from miles.config.paths import SAMPLE_FILE_ENDINGS
from miles.hf.shape import model_shape
from miles.utils.errors import UserError
from miles.utils.types import Sample

FORMAT = "miles-samples"
VERSION = 1


@dataclass(frozen=True)
class Header:
    """What a file holds.

    Attributes:
        rollout_id: the rollout.
        evaluation: the name of the set, if the samples are of an evaluation after that rollout.
        hf_checkpoint: folder of the tokenizer, if the writer named it.
        samples: their number.
    """

    rollout_id: int
    evaluation: str | None
    hf_checkpoint: str | None
    samples: int


def samples_path(path_template: str, rollout_id: int, evaluation: str | None = None) -> Path:
    """The file of a rollout, or the one beside it of an evaluation: x/3.jsonl and x/3.eval_NAME.jsonl.

    `{rollout_id}` in path_template is replaced. What a file name can't hold of a set's name is %-encoded, as in a URL.
    """
    path = path_template.replace("{rollout_id}", str(rollout_id))
    if evaluation is None:
        return Path(path)
    ending = next(ending for ending in SAMPLE_FILE_ENDINGS if path.endswith(ending))
    return Path(f"{path.removesuffix(ending)}.eval_{quote(evaluation, safe=' ')}{ending}")


def save_samples(
    path_template: str,
    rollout_id: int,
    groups: Sequence[Sequence[Sample]],
    *,
    evaluation: str | None = None,
    hf_checkpoint: str | None = None,
) -> Path:
    """Write the samples of a rollout, or of the evaluation set of that name, to `samples_path(...)`; returns it.

    Folders are made. A file of that name is replaced, at once: nobody sees half of one. The header keeps hf_checkpoint,
    the run's: with its tokenizer `miles.tools.show_samples` knows the text of each token.

    Raises: ValueError that names the sample, if its metadata holds what JSON does not.
    """
    path = samples_path(path_template, rollout_id, evaluation)
    samples = list(itertools.chain.from_iterable(groups))
    header = asdict(Header(rollout_id, evaluation, hf_checkpoint, len(samples)))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    with _open(unfinished, "wb", compressed=path.suffix == ".gz") as file:
        file.write(_line({"format": FORMAT, "version": VERSION, **header}))
        for sample in samples:
            record = sample.to_dict()
            try:
                line = _line(record)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{path}: sample {sample.index} of group {sample.group_index} cannot be written as JSON: {error}"
                ) from error
            file.write(line)
    os.replace(unfinished, path)
    return path


def load_samples(path_template: str, rollout_id: int, hf_checkpoint: str | None = None) -> list[list[Sample]]:
    """The groups of a rollout, as `save_samples` got them: neighbours that share `group_index`.

    Args:
        hf_checkpoint: folder of the model that is about to learn from them.

    Raises: ValueError if the file is missing, was cut off, is none of ours, or holds an evaluation, or if that model
        has no such tokens.
    """
    path = samples_path(path_template, rollout_id)
    if not path.is_file():
        raise UserError(
            f"no file {path} of rollout {rollout_id} (--load-debug-rollout-data {path_template}): give the path that "
            "--save-debug-rollout-data had, and at most as many rollouts as it saved"
        )
    header, samples = read_samples(path)
    if header.evaluation is not None:
        raise UserError(f"{path} holds samples of the evaluation {header.evaluation}, which nothing is learned from")
    if hf_checkpoint is not None:
        _check_tokens(path, header, samples, hf_checkpoint)
    return [list(group) for _, group in itertools.groupby(samples, lambda sample: sample.group_index)]


def _check_tokens(path: Path, header: Header, samples: Sequence[Sample], hf_checkpoint: str) -> None:
    # An embedding that is shared out among ranks gives zeros for a token that none of them has.
    shape = model_shape(hf_checkpoint)
    assert shape is not None, f"a rule of --hf-checkpoint refuses {hf_checkpoint}"
    size = shape["vocab_size"]
    largest = max((int(sample.tokens.array.max(initial=0)) for sample in samples), default=0)
    if largest >= size:
        raise UserError(
            f"{path} has the token {largest}, and --hf-checkpoint {hf_checkpoint} has {size} tokens: the samples are "
            f"of another model ({header.hf_checkpoint})"
        )


def read_samples(path: Path) -> tuple[Header, list[Sample]]:
    """A file's header and all its samples, in their order.

    Raises: ValueError that names file and line, if it was not written by `save_samples`, or not to its end.
    """
    try:
        with _open(path, "rb", compressed=path.suffix == ".gz") as file:
            lines = iter(file)
            header = _header(path, next(lines, b""))
            samples = list(_samples(path, lines))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is no whole gzip file: {error}") from error
    if len(samples) != header.samples:
        raise UserError(f"{path} was cut off: it has {len(samples)} samples and says {header.samples}")
    return header, samples


def _open(path: Path, mode: Literal["rb", "wb"], *, compressed: bool) -> BinaryIO | gzip.GzipFile:
    # Level 1: numbers hardly get smaller with more, and the run waits.
    return gzip.open(path, mode, compresslevel=1) if compressed else path.open(mode)


def _line(record: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which UTF-8 has no bytes for
        text = json.dumps(record).encode()
    return text + b"\n"


def _header(path: Path, line: bytes) -> Header:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        record = None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is no file of samples: its first line is not the header of --save-debug-rollout-data")
    if record["version"] != VERSION:
        raise UserError(f"{path} has version {record['version']} of the format, and this Miles reads {VERSION}")
    return Header(**{field.name: record[field.name] for field in fields(Header)})


def _samples(path: Path, lines: Iterator[bytes]) -> Iterator[Sample]:
    for number, line in enumerate(lines, 2):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise UserError("it is no object")
            sample = Sample.from_dict(record)
            sample.validate()
        except (TypeError, ValueError) as error:  # a field of another type is compared with numbers
            raise UserError(f"{path}:{number}: no sample: {error}") from error
        yield sample
