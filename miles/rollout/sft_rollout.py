"""Supervised samples: the label stands where a response would."""

from typing import Any

from miles.utils.errors import UserError
from miles.utils.types import Sample


def sft_samples(groups: list[list[Sample]], tokenizer: Any) -> list[list[Sample]]:
    """Complete each sample in place with its label and the end token as the response, all of it trained on.

    Raises: ValueError for a sample without a label, or a tokenizer without an end token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("--loss-type sft_loss: the tokenizer has no end token (eos_token)")
    for group in groups:
        for sample in group:
            if sample.label is None:
                raise UserError(f"--loss-type sft_loss needs --label-key: sample {sample.index} has no label")
            answer = tokenizer.encode(sample.label, add_special_tokens=False) + [tokenizer.eos_token_id]
            sample.tokens = sample.tokens + answer
            sample.response = sample.label
            sample.response_length = len(answer)
            sample.loss_mask = [1] * len(answer)
            sample.status = Sample.Status.COMPLETED
            sample.reward = 0.0
    return groups
