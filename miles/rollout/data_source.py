"""Prompts as samples, and the exact position in them that a checkpoint keeps."""

import copy
import hashlib
import math
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from miles.config import RunConfig
from miles.rollout.prompt_file import BadRow, Number, plain, raise_problems, read_rows
from miles.utils.types import Sample


class PromptDataset:
    """A prompt file as a list of samples in the file's order, tokens filled in, checked completely on construction.

    Args:
        path: a .jsonl or .parquet file (see miles.rollout.prompt_file).
        tokenizer: a Hugging Face tokenizer. Special tokens are never added to a plain string.
        input_key: column of the prompt: a string, or a list of chat messages, which needs apply_chat_template.
        label_key: column of the expected answer, a string or number, kept digit for digit as a string; None: no labels.
        metadata_key: column of a dict for rewards and custom code; may be absent.
        apply_chat_template: render chat messages (a string counts as one user message) and open the answer.
        apply_chat_template_kwargs: passed on to the template, such as {"enable_thinking": False}.
        max_prompt_len: most tokens of a prompt, after the template; None: no limit.

    Raises: ValueError that lists the unusable rows with file and line: the first ten and their number.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        input_key: str,
        label_key: str | None,
        metadata_key: str,
        apply_chat_template: bool,
        apply_chat_template_kwargs: dict[str, Any],
        max_prompt_len: int | None,
    ) -> None:
        self.path = Path(path)
        if apply_chat_template and tokenizer.chat_template is None:
            raise ValueError("--apply-chat-template: the tokenizer has no chat template; use one that has, or drop it")
        columns = [key for key in (input_key, label_key, metadata_key) if key is not None]
        places, samples, problems = [], [], []
        for place, row in read_rows(self.path, columns):
            try:
                if isinstance(row, BadRow):
                    raise row
                prompt = _prompt(row, input_key, apply_chat_template)
                label = None if label_key is None else _label(row, label_key)
                metadata = _metadata(row, metadata_key)
                if apply_chat_template:
                    prompt = _render(prompt, tokenizer, apply_chat_template_kwargs)
            except BadRow as problem:
                problems.append(f"{place}: {problem}")
            else:
                places.append(place)
                samples.append(Sample(prompt=prompt, label=label, metadata=metadata))
        if not samples and not problems:
            raise ValueError(f"prompt file {self.path} has no rows")
        if samples:
            token_ids = tokenizer([sample.prompt for sample in samples], add_special_tokens=False)["input_ids"]
            for place, sample, tokens in zip(places, samples, token_ids, strict=True):
                sample.tokens = tokens
                if not tokens:
                    problems.append(f"{place}: the prompt has no tokens")
                elif max_prompt_len is not None and len(tokens) > max_prompt_len:
                    problems.append(
                        f"{place}: the prompt has {len(tokens)} tokens; at most {max_prompt_len} are allowed"
                    )
        raise_problems(self.path, problems)
        self.samples: list[Sample] = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Sample:
        return self.samples[row]

    def fingerprint(self) -> str:
        """SHA-256 of the file's bytes."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class RolloutDataSource:
    """Hands out groups of samples, epoch after epoch, and knows its position exactly.

    With `rollout_shuffle` the order of epoch e is drawn from the seed `rollout_seed + e`.
    Prompts come from `prompt_data`; the limit of a prompt is `rollout_max_prompt_len` tokens, and one less than
    `rollout_max_context_len`, so that at least one token can be generated.
    """

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        limits = [config.rollout_max_prompt_len]
        if config.rollout_max_context_len is not None:
            limits.append(config.rollout_max_context_len - 1)
        self.dataset = PromptDataset(
            config.prompt_data,
            tokenizer,
            input_key=config.input_key,
            label_key=config.label_key,
            metadata_key=config.metadata_key,
            apply_chat_template=config.apply_chat_template,
            apply_chat_template_kwargs=config.apply_chat_template_kwargs,
            max_prompt_len=min((limit for limit in limits if limit is not None), default=None),
        )
        self._samples_per_prompt = config.n_samples_per_prompt
        self._seed = config.rollout_seed if config.rollout_shuffle else None
        self._fingerprint = f"{self.dataset.fingerprint()} shuffle seed {self._seed}"
        self._group_index = 0
        self._sample_index = 0
        self._start_epoch(0)

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        return len(self.dataset)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._offset = 0
        self._order = list(range(len(self.dataset)))
        if self._seed is not None:
            random.Random(self._seed + epoch).shuffle(self._order)

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """The next num_groups prompts, each as n_samples_per_prompt samples; goes on into the next epoch."""
        groups = []
        while len(groups) < num_groups:
            if self._offset == len(self._order):
                self._start_epoch(self._epoch + 1)
            prompt = self.dataset[self._order[self._offset]]
            group = [copy.deepcopy(prompt) for _ in range(self._samples_per_prompt)]
            for sample in group:
                sample.group_index = self._group_index
                sample.index = self._sample_index
                self._sample_index += 1
            groups.append(group)
            self._group_index += 1
            self._offset += 1
        return groups

    def state_dict(self) -> dict[str, int | str]:
        """The position for JSON: the epoch, prompts consumed in it, the next group's and the next sample's index."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "group_index": self._group_index,
            "sample_index": self._sample_index,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue at a saved position.

        Raises: ValueError if the file's content or the order of its rows is not what the position was saved for.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the saved position belongs to other data: {self.dataset.path} now has SHA-256 {self._fingerprint}, "
                f"saved was {state['fingerprint']}; give the same --prompt-data, --rollout-shuffle and --rollout-seed, "
                "or start without loading"
            )
        self._start_epoch(state["epoch"])
        self._offset = state["offset"]
        self._group_index = state["group_index"]
        self._sample_index = state["sample_index"]


def _prompt(row: dict[str, Any], key: str, apply_chat_template: bool) -> str | list[dict[str, Any]]:
    if row.get(key) is None:
        raise BadRow(f"no {key!r} (--input-key); the row has {', '.join(map(repr, row)) or 'no keys'}")
    prompt = row[key]
    if isinstance(prompt, str) and not isinstance(prompt, Number):
        if not prompt.strip():
            raise BadRow(f"{key!r} is empty")
        _check_unicode(prompt, key)
        return [{"role": "user", "content": prompt}] if apply_chat_template else prompt
    if not isinstance(prompt, list):
        raise BadRow(f"{key!r} is {_shown(prompt)}; a string or a list of chat messages is allowed")
    if not apply_chat_template:
        raise BadRow(f"{key!r} is a list of chat messages, which needs --apply-chat-template")
    if not prompt or not all(isinstance(message, dict) and "role" in message for message in prompt):
        raise BadRow(f"{key!r} must be a list of at least one message, each with a 'role' and its content")
    return plain(prompt)


def _label(row: dict[str, Any], key: str) -> str:
    label = row.get(key)
    if label is None:
        raise BadRow(f"no label {key!r} (--label-key); the row has {', '.join(map(repr, row))}")
    if isinstance(label, bool) or not isinstance(label, str | int | float | Decimal):
        raise BadRow(f"the label {key!r} is {_shown(label)}; a string or a number is allowed")
    if isinstance(label, float) and not math.isfinite(label):
        raise BadRow(f"the label {key!r} is {label}")
    label = str(label)
    _check_unicode(label, key)
    return label


def _metadata(row: dict[str, Any], key: str) -> dict[str, Any]:
    metadata = row.get(key)
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise BadRow(f"{key!r} (--metadata-key) is {_shown(metadata)}; an object is allowed")
    return plain(metadata)


def _render(messages: list[dict[str, Any]], tokenizer: Any, template_kwargs: dict[str, Any]) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_kwargs)
    except (TemplateError, TypeError) as error:
        raise BadRow(f"the chat template refuses the messages: {error}") from error
    _check_unicode(text, "prompt")
    return text


def _check_unicode(text: str, key: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"{key!r} holds half a surrogate pair at character {error.start}: not Unicode text") from error


def _shown(value: Any) -> str:
    text = repr(plain(value))
    return f"{text if len(text) <= 60 else text[:60] + '...'} ({type(plain(value)).__name__})"
