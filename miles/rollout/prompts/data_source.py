"""Prompts as samples, and the exact position in them that a checkpoint keeps."""

import bisect
import hashlib
import itertools
import logging
import pickle
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from miles.config import RunConfig
from miles.config.paths import split_slice
from miles.rollout.hook_results import check_sample, groups_in
from miles.rollout.prompts.data_order import epoch_order, prompts_per_epoch
from miles.rollout.prompts.prompt_file import ROWS_AT_ONCE, BadRow, Problems, Row, open_prompt_file
from miles.rollout.prompts.prompt_format import PromptFormat
from miles.utils.dotted_path import load_class
from miles.utils.errors import UserError
from miles.utils.types import Sample
from miles.utils.user_code import named_errors

logger = logging.getLogger(__name__)


class PromptDataset:
    """The prompts of a file as samples in the file's order, tokens filled in.

    The constructor goes through the whole file and checks every row; what it keeps of a prompt is where it stands.
    Samples are made anew, from the file, each time they are asked for.

    Prompts of more than max_prompt_len tokens are left out, and their number is logged.

    Args:
        path: a .jsonl or .parquet file (see miles.rollout.prompts.prompt_file), or `file@[a:b]`: its rows a to b.
        tokenizer: a Hugging Face tokenizer. Special tokens are never added to a plain string.
        form: the columns, and how a prompt is rendered.
        max_prompt_len: most tokens of a prompt, after the template; None: no limit.

    Attributes:
        longest_prompt: tokens of the longest prompt.
        too_long: rows that were left out.

    Raises: ValueError that lists the unusable rows with file and line (the first ten and their number), or says that
        no row is left.
    """

    def __init__(self, path: str, tokenizer: Any, form: PromptFormat, max_prompt_len: int | None) -> None:
        self.name = str(path)
        self._template = form.template_of(tokenizer)
        self._conversations = form.conversations_of(self._template, tokenizer)
        self._tokenizer = tokenizer
        self._form = form
        file, rows = split_slice(self.name)
        self._file = open_prompt_file(file, form.columns)
        self._keys = array("Q")
        self.longest_prompt = 0
        self.too_long = 0
        problems = Problems(file)
        too_long = ""
        for batch in itertools.batched(self._file.scan(rows), ROWS_AT_ONCE):
            for row, sample in self._checked(batch, problems):
                tokens = len(sample.tokens)
                if not tokens:
                    problems.add(row.place, "the prompt has no tokens")
                elif max_prompt_len is not None and tokens > max_prompt_len:
                    self.too_long += 1
                    too_long = too_long or f"{row.place} has {tokens} tokens"
                else:
                    self._keys.append(row.key)
                    self.longest_prompt = max(self.longest_prompt, tokens)
        problems.check()
        if self.too_long:
            left_out = f"prompts of more than {max_prompt_len} tokens; the first, {too_long}"
            if not self._keys:
                raise UserError(
                    f"{self.name} has only {left_out}: raise --rollout-max-prompt-len and --rollout-max-context-len "
                    "(of an evaluation set --eval-max-prompt-len and --eval-max-context-len), or give other prompts"
                )
            logger.warning("%s: left out %d of %d %s", self.name, self.too_long, len(self) + self.too_long, left_out)
        if not self._keys:
            raise UserError(f"prompt file {self.name} has no rows")

    @classmethod
    def from_config(
        cls, config: RunConfig, path: str, tokenizer: Any, *, input_key: str, label_key: str | None
    ) -> Self:
        """The prompts of `path`, read as `config` says, with these columns of prompt and label.

        The longest prompt allowed has rollout_max_prompt_len tokens, and one less than rollout_max_context_len, so that
        at least one token can be generated.
        """
        limits = [] if config.rollout_max_prompt_len is None else [config.rollout_max_prompt_len]
        if config.rollout_max_context_len is not None:
            limits.append(config.rollout_max_context_len - 1)
        form = PromptFormat.from_config(config, input_key=input_key, label_key=label_key)
        return cls(path, tokenizer, form, min(limits, default=None))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, prompt: int) -> Sample:
        return self.take([prompt])[0]

    def __iter__(self) -> Iterator[Sample]:
        for prompts in itertools.batched(range(len(self)), ROWS_AT_ONCE):
            yield from self.take(prompts)

    def take(self, prompts: Sequence[int]) -> list[Sample]:
        """New samples of these prompts, counted from 0, in this order."""
        rows = self._file.read([self._keys[prompt] for prompt in prompts])
        samples = [self._form.sample(row, self._template, self._conversations) for row in rows]
        self._tokenize(samples)
        return samples

    def fingerprint(self) -> dict[str, Any]:
        """For JSON: SHA-256 of the file's bytes, the number of prompts, and SHA-256 of where they stand in the file."""
        return {
            "path": self.name,
            "sha256": self._file.sha256(),
            "prompts": len(self),
            "chosen": hashlib.sha256(self._keys.tobytes()).hexdigest(),
        }

    def _checked(self, rows: Sequence[Row], problems: Problems) -> list[tuple[Row, Sample]]:
        good = []
        for row in rows:
            try:
                if isinstance(row.content, BadRow):
                    raise row.content
                sample = self._form.sample(row.content, self._template, self._conversations)
                self._form.check_label(sample)
                good.append((row, sample))
            except BadRow as problem:
                problems.add(row.place, problem)
        self._tokenize([sample for _, sample in good])
        return good

    def _tokenize(self, samples: list[Sample]) -> None:
        if samples:
            texts = [sample.prompt for sample in samples]
            token_ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            for sample, tokens in zip(samples, token_ids, strict=True):
                sample.tokens = tokens


class DataSource(ABC):
    """Where prompts come from. `--data-source-path` names a class derived from this one.

    Args of the constructor, in this order: the run's configuration, and the checkpoint's tokenizer.
    """

    @abstractmethod
    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next num_groups prompts, each as n_samples_per_prompt pending samples.

        A sample's `tokens` are the prompt's ids; `index` is its own in the whole run, `group_index` its prompt's.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position for JSON, from which `load_state_dict` continues."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; ValueError if it is not one in these prompts."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of prompts in an epoch."""

    @property
    @abstractmethod
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""


class RolloutDataSource(DataSource):
    """Hands out groups of samples, epoch after epoch, and knows its position exactly.

    The order of an epoch is that of `miles.rollout.prompts.data_order.epoch_order`, with `prompt_data_weights` as
    weights, and with `rollout_shuffle` the seed `rollout_seed`.
    """

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        assert config.prompt_data is not None, "a rule asks for it"
        self._datasets = [
            PromptDataset.from_config(config, path, tokenizer, input_key=config.input_key, label_key=config.label_key)
            for path in config.prompt_data
        ]
        self._sizes = [len(dataset) for dataset in self._datasets]
        self._starts = list(itertools.accumulate(self._sizes, initial=0))
        self._weights = config.prompt_data_weights
        for path, count in zip(config.prompt_data, prompts_per_epoch(self._sizes, self._weights), strict=True):
            if count == 0:
                raise UserError(
                    f"--prompt-data-weights: {path} gets none of the {len(self)} prompts of an epoch; "
                    "raise its weight, or leave it out"
                )
        self._samples_per_prompt = config.n_samples_per_prompt
        self._seed = config.rollout_seed if config.rollout_shuffle else None
        self._fingerprint = {
            "files": [dataset.fingerprint() for dataset in self._datasets],
            "weights": self._weights,
            "shuffle_seed": self._seed,
        }
        self._group_index = 0
        self._sample_index = 0
        self._start_epoch(0)

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        return self._starts[-1]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(dataset.longest_prompt for dataset in self._datasets)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._offset = 0
        self._order = epoch_order(self._sizes, self._weights, self._seed, epoch)

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next num_groups prompts, each as n_samples_per_prompt samples; goes on into the next epoch."""
        prompts: list[int] = []
        while len(prompts) < num_groups:
            if self._offset == len(self._order):
                self._start_epoch(self._epoch + 1)
            ahead = self._order[self._offset : self._offset + num_groups - len(prompts)]
            prompts += ahead
            self._offset += len(ahead)
        return [self._group(sample) for sample in self._take(prompts)]

    def _take(self, prompts: Sequence[int]) -> list[Sample]:
        files = [bisect.bisect_right(self._starts, prompt) - 1 for prompt in prompts]
        samples: list[Iterator[Sample]] = [
            iter(
                dataset.take(
                    [prompt - self._starts[i] for prompt, file in zip(prompts, files, strict=True) if file == i]
                )
            )
            for i, dataset in enumerate(self._datasets)
        ]
        return [next(samples[file]) for file in files]

    def _group(self, prompt: Sample) -> list[Sample]:
        copied = pickle.dumps(prompt, pickle.HIGHEST_PROTOCOL)  # a deep copy, ten times as fast as copy.deepcopy
        group = [pickle.loads(copied) for _ in range(self._samples_per_prompt)]
        for sample in group:
            sample.group_index = self._group_index
            sample.index = self._sample_index
            self._sample_index += 1
        self._group_index += 1
        return group

    def state_dict(self) -> dict[str, Any]:
        """The position for JSON, and what it is a position in.

        It is the epoch, the prompts consumed in it, and the next group's and the next sample's index.
        """
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "group_index": self._group_index,
            "sample_index": self._sample_index,
            "data": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises: ValueError that says what is different, if a file's content, the choice of its rows or their order is
            not what the position was saved for. A file may have moved.
        """
        if differences := list(_differences(state["data"], self._fingerprint)):
            raise UserError(
                f"the saved position belongs to other data: {'; '.join(differences)}. Give what was given then, or "
                "start without loading"
            )
        self._start_epoch(state["epoch"])
        self._offset = state["offset"]
        self._group_index = state["group_index"]
        self._sample_index = state["sample_index"]


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if len(saved["files"]) != len(now["files"]):
        yield f"--prompt-data had {len(saved['files'])} files and has {len(now['files'])}"
        return
    for then, file in zip(saved["files"], now["files"], strict=True):
        if file["sha256"] != then["sha256"]:
            yield f"{file['path']} has SHA-256 {file['sha256']}, and {then['path']} had {then['sha256']}"
        elif file["chosen"] != then["chosen"]:
            yield (
                f"{file['path']} gives {file['prompts']} prompts and {then['path']} gave {then['prompts']}, or others "
                "(its slice, the limit of a prompt, the tokenizer or the template is different)"
            )
    for name, flag in (("weights", "--prompt-data-weights"), ("shuffle_seed", "--rollout-shuffle and --rollout-seed")):
        if saved[name] != now[name]:
            yield f"{flag} were {saved[name]} and are {now[name]}"


def load_data_source(config: RunConfig, tokenizer: Any) -> DataSource:
    """The prompts of a run: those of `--prompt-data`, or of the class that `--data-source-path` names.

    Raises:
        ValueError: the class can't be imported, is no `DataSource`, or lacks a method; or the prompts are unusable.
    """
    if config.data_source_path is None:
        return RolloutDataSource(config, tokenizer)
    source = load_class("--data-source-path", config.data_source_path, DataSource, "config", "tokenizer")
    with errors_of_source(config):
        return source(config, tokenizer)


def errors_of_source(config: RunConfig) -> AbstractContextManager[None]:
    """Around a call of a data source: one of the user's is foreign code (`miles.utils.user_code.named_errors`)."""
    path = config.data_source_path
    return nullcontext() if path is None else named_errors(f"--data-source-path {path}")


def take_groups(config: RunConfig, data: DataSource, num_groups: int) -> list[list[Sample]]:
    """The next groups of a data source, which may be the user's: checked.

    Raises:
        ValueError: they are not num_groups groups of n_samples_per_prompt pending samples with tokens, an index and one
            group_index a group.
    """
    name = f"{type(data).__name__}.get_samples"
    with errors_of_source(config):
        groups = data.get_samples(num_groups)
    if config.data_source_path is not None:
        groups = groups_in(name, groups)
        for sample in itertools.chain.from_iterable(groups):
            check_sample(name, sample)
    sizes = [len(group) for group in groups]
    if sizes != [config.n_samples_per_prompt] * num_groups:
        raise UserError(
            f"{name}({num_groups}) returned groups of {sizes} samples; it must return {num_groups} groups of "
            f"--n-samples-per-prompt {config.n_samples_per_prompt}"
        )
    for group in groups:
        for sample in group:
            if sample.status is not Sample.Status.PENDING or not sample.tokens or sample.index is None:
                raise UserError(
                    f"{name} returned a sample with index {sample.index}, {len(sample.tokens)} tokens and status "
                    f"{sample.status}; it must have an index and the prompt's tokens, and be pending"
                )
        if len({sample.group_index for sample in group} - {None}) != 1 or group[0].group_index is None:
            raise UserError(f"{name}: the samples of a group must share one group_index of their own")
    if len({group[0].group_index for group in groups}) != num_groups:
        raise UserError(f"{name}: two groups have one group_index; each group needs one of its own in the whole run")
    return groups
