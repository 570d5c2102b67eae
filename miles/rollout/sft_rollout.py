"""Supervised samples: what is learned stands where a response would."""

from collections.abc import Iterable
from typing import Any

from miles.utils.errors import UserError
from miles.utils.types import Sample


def sft_samples(groups: list[list[Sample]], tokenizer: Any) -> list[list[Sample]]:
    """Complete each sample in place with a response.

    It is the rest of its conversation, of which the assistant's parts are trained on, or its label and the end token,
    all of it.

    Raises: ValueError for a sample without a conversation and a label, or a tokenizer without an end token.
    """
    for group in groups:
        for sample in group:
            parts = sample.metadata.pop("parts", None)
            if parts is None:
                _answer(sample, tokenizer)
            else:
                encoded = [tokenizer.encode(text, add_special_tokens=False) for text, _ in parts]
                learned = [mask for _, mask in parts]
                _complete(sample, "".join(text for text, _ in parts), zip(encoded, learned, strict=True))
    return groups


def _answer(sample: Sample, tokenizer: Any) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError("--loss-type sft_loss: the tokenizer has no end token (eos_token)")
    if sample.label is None:
        raise UserError(f"--loss-type sft_loss needs --label-key: sample {sample.index} has no label")
    answer = tokenizer.encode(sample.label, add_special_tokens=False) + [tokenizer.eos_token_id]
    _complete(sample, sample.label, [(answer, True)])


def _complete(sample: Sample, response: str, parts: Iterable[tuple[list[int], bool]]) -> None:
    ids: list[int] = []
    mask: list[int] = []
    for part, learned in parts:
        ids += part
        mask += [int(learned)] * len(part)
    sample.tokens = sample.tokens + ids
    sample.response = response
    sample.response_length = len(ids)
    sample.loss_mask = mask
    sample.status = Sample.Status.COMPLETED
    sample.reward = 0.0
