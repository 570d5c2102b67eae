"""What an engine answered for a sample, checked, and how it extends the sample."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles.hf.shape import end_ids_said
from miles.utils.array_list import ArrayList, as_array
from miles.utils.errors import UserError
from miles.utils.types import Sample


class UnusableAnswer(RuntimeError):
    """An engine answered something that cannot be trained on; asking again may help."""


@dataclass(frozen=True)
class Answer:
    """New tokens of one sample. `aborted`: the engine was told to stop; `stopped`: it says that the response ended."""

    ids: list[int]
    log_probs: ArrayList
    weight_version: str
    aborted: bool
    stopped: bool


def read_answer(reply: Any) -> Answer:
    """The answer in one of the replies of `SGLangClient.generate`.

    Raises:
        UnusableAnswer: parts are missing or contradict each other, or a log-probability is no number.
    """
    try:
        meta = reply["meta_info"]
        reason = meta["finish_reason"]["type"]
        ids = reply["output_ids"]
        entries = meta["output_token_logprobs"]
        # No loop of Python's over tokens: there may be tens of thousands.
        log_probs, written, *_ = map(list, zip(*entries, strict=True)) if entries else ([], [])
        counts = {len(ids), len(log_probs), meta["completion_tokens"]}
        version = str(meta["weight_version"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableAnswer(f"parts are missing: {type(error).__name__} {error} in {reply!r:.300}") from error
    if reason not in ("stop", "length", "abort"):
        raise UnusableAnswer(f"an unknown finish reason {reason!r}")
    if len(counts) > 1 or (not ids and reason != "abort"):
        raise UnusableAnswer(
            f"{len(ids)} ids, {len(log_probs)} log-probabilities and a count of {meta['completion_tokens']} new tokens"
        )
    if written != ids:
        raise UnusableAnswer(f"log-probabilities of other tokens than its own: {written!r:.200}, not {ids!r:.200}")
    try:
        numbers = ArrayList(as_array(log_probs, "log_probs", np.float32))
    except UserError as error:  # None among them, which is JSON's NaN
        raise UnusableAnswer(f"log-probabilities that are not numbers: {log_probs!r:.200}") from error
    return Answer(ids, numbers, version, reason == "abort", reason == "stop")


def extend(
    sample: Sample,
    answer: Answer,
    *,
    tokenizer: Any,
    room: int,
    end_ids: frozenset[int],
    stop_ids: frozenset[int],
    stop_texts: Sequence[str],
    skip_special_tokens: bool,
) -> None:
    """Add `answer` to the end of `sample`, in place, and set its status.

    Args:
        room: most tokens that were asked for.
        end_ids: the model's own end tokens.
        stop_ids, stop_texts: what ends a response. Its text holds them, as SGLang's does with `no_stop_trim`: a reward
            may look for a closing tag. It ends behind a stop text, in the middle of a token perhaps; of end tokens
            see `without_end`.
    """
    ids, earlier = answer.ids, sample.tokens[sample.prompt_length :].tolist()
    ended_by_id = bool(ids) and ids[-1] in stop_ids
    shown = without_end(ids, tokenizer, end_ids, stop_ids) if ended_by_id else ids
    text = tokenizer.decode(shown, skip_special_tokens=skip_special_tokens)
    ends = ((text.find(stop), len(stop)) for stop in stop_texts)
    cut = min((place + length for place, length in ends if place >= 0), default=None)
    # SGLang reports `length` for whatever stands at the limit, an end token too, and `abort` likewise.
    if ended_by_id or cut is not None or answer.stopped:
        status = Sample.Status.COMPLETED
    elif len(ids) >= room or not answer.aborted:
        status = Sample.Status.TRUNCATED
    else:
        status = Sample.Status.ABORTED

    behind = 0 if cut is None else len(text) - cut
    if earlier:  # decoded as one: a character may have been cut in two
        text = tokenizer.decode([*earlier, *shown], skip_special_tokens=skip_special_tokens)
    sample.response = text[: len(text) - behind]
    sample.status = status
    if not ids:
        return
    sample.tokens = sample.tokens + ids
    sample.loss_mask = np.append(sample.mask, np.ones(len(ids), np.int8))
    earlier_log_probs = sample.rollout_log_probs
    sample.rollout_log_probs = earlier_log_probs + answer.log_probs if earlier_log_probs else answer.log_probs
    sample.response_length += len(ids)
    # New lists, as above: a copy of the sample may hold the old ones.
    sample.weight_versions = [*sample.weight_versions, answer.weight_version]
    uncounted = sample.response_length - sum(sample.weight_version_lengths)
    sample.weight_version_lengths = [*sample.weight_version_lengths, uncounted]


def without_end(
    ids: Sequence[int], tokenizer: Any, end_ids: Collection[int], stop_ids: Collection[int]
) -> Sequence[int]:
    """Ids whose text is what a model wrote: without a last one that is an end token of the model's own.

    One of `stop_ids`, which a user named, goes too if it is a special token; the text of any other is the model's.
    """
    if not ids:
        return ids
    last = ids[-1]
    named = last in stop_ids and not tokenizer.decode([last], skip_special_tokens=True)
    return ids[:-1] if last in end_ids or named else ids


def end_token_ids(checkpoint: str | Path, tokenizer: Any) -> frozenset[int]:
    """The ids that end a response: those of config.json and generation_config.json, and the tokenizer's `eos_token`."""
    return frozenset({tokenizer.eos_token_id, *end_ids_said(checkpoint)} - {None})
