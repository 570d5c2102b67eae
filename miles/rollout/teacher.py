"""The SGLang teacher of on-policy distillation: how likely each token of a finished response is to it.

On-policy distillation (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649; Gu et al. 2024,
https://arxiv.org/abs/2306.08543) samples from the student and pulls it to the teacher at each sampled token.

The teacher's log-probabilities are at temperature 1, whatever --rollout-temperature is: SGLang divides by a temperature
only where it draws. The student's are at --rollout-temperature.
"""

import importlib.metadata
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from miles.config import RunConfig
from miles.engines.client import SGLangClient, SGLangError
from miles.rollout.slots import Slots
from miles.utils.errors import UserError
from miles.utils.tasks import all_of
from miles.utils.types import Sample

logger = logging.getLogger(__name__)

PROBES = 64
# Nats, on average: above what rounding makes of one model, below what two models differ by at tokens without sense.
LARGEST_DIFFERENCE = 0.5


class Teacher:
    """The servers at --opd-teacher-urls, which all have one model; a request a group, to the least busy of them.

    Args:
        config: the run's configuration.
        tokenizer: the student's, whose ids the teacher is asked about.
    """

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        limits: Any = {"request_timeout": config.rollout_request_timeout, "retries": config.rollout_request_retries}
        self._clients = [SGLangClient(url.rstrip("/"), **limits) for url in config.opd_teacher_urls or ()]
        self._slots = Slots(self._clients, config.sglang_server_concurrency)
        self._tokenizer = tokenizer

    async def check(self, longest: int) -> None:
        """Ask each server for its state, its tokenizer and some log-probabilities.

        Args:
            longest: tokens of the longest sample, prompt and response, that may have to be looked at.

        Raises:
            ValueError: a server does not answer, can't take `longest` tokens, has another vocabulary, or another model
                than the first server.
        """
        answers = await all_of([self._probe(client, longest) for client in self._clients])
        for client, answer in zip(self._clients, answers, strict=True):
            difference = np.abs(np.subtract(answer, answers[0])).mean()
            if difference > LARGEST_DIFFERENCE:
                raise UserError(
                    f"the teachers {self._clients[0].url} and {client.url} (--opd-teacher-urls) serve different "
                    f"models: their log-probabilities of the same tokens differ by {difference:.2g} on average; name "
                    "servers of one model"
                )

    async def score(self, samples: Sequence[Sample]) -> None:
        """Set `teacher_log_probs` of each sample: one number a response token.

        Raises:
            RuntimeError: a request failed for good, or an answer has another number of tokens, other tokens, or numbers
                that are not finite.
        """
        async with self._slots.take(len(samples)) as client:
            log_probs = await _ask(client, [s.tokens for s in samples], [s.prompt_length for s in samples])
        for sample, values in zip(samples, log_probs, strict=True):
            sample.teacher_log_probs = values

    async def close(self) -> None:
        """Close the connections; the servers run on."""
        for client in self._clients:
            await client.close()

    async def _probe(self, client: SGLangClient, longest: int) -> np.ndarray:
        """The log-probabilities of ids from all over the vocabulary, after checking that the server knows them."""
        name = f"the teacher {client.url} (--opd-teacher-urls)"
        ids = np.linspace(0, len(self._tokenizer) - 1, PROBES).round().astype(int).tolist()
        ours = theirs = [self._tokenizer.decode([number]) for number in ids]
        try:
            info = await client.server_info()
            if not isinstance(info, dict) or not info.keys() >= {"skip_tokenizer_init", "max_req_input_len"}:
                raise UserError(
                    f"{name} does not say what it is: an SGLang server is needed, here is "
                    f"{importlib.metadata.version('sglang')}"
                )
            if info["skip_tokenizer_init"]:
                logger.warning("%s has no tokenizer that could be compared with the student's", name)
            else:
                theirs = await client.detokenize([[number] for number in ids])
        except SGLangError as error:
            raise UserError(f"{name} can't be asked: {error}") from error
        most = info["max_req_input_len"] - 1
        if longest > most:
            raise UserError(
                f"{name} takes sequences of at most {most} tokens, and a sample may have {longest}: start it with a "
                f"larger --context-length, or give --rollout-max-context-len {most}"
            )
        for number, our, their in zip(ids, ours, theirs, strict=True):
            if our != their:
                raise UserError(
                    f"{name} has another vocabulary: id {number} is {their!r} to it and {our!r} to --hf-checkpoint; "
                    "the tokenizers must be the same"
                )
        try:
            (values,) = await _ask(client, [ids], [1])
        except RuntimeError as error:
            raise UserError(f"{name} can't look at the student's {len(self._tokenizer)} token ids: {error}") from error
        return values


async def _ask(client: SGLangClient, tokens: Sequence[Sequence[int]], first: list[int]) -> list[np.ndarray]:
    """The log-probability of each token from place `first` >= 1 on, given all before it, of each sequence."""
    try:
        replies = await client.score(tokens, [place - 1 for place in first])
    except SGLangError as error:
        raise RuntimeError(f"the teacher (--opd-teacher-urls) failed: {error}") from error
    return [_values(client.url, reply, ids[place:]) for reply, ids, place in zip(replies, tokens, first, strict=True)]


def _values(url: str, reply: dict, asked: Sequence[int]) -> np.ndarray:
    """The log-probabilities of one answer, float32, whose first entry is the token before those that were asked for."""
    entries = reply["meta_info"]["input_token_logprobs"][1:]
    if len(entries) != len(asked):
        raise RuntimeError(f"the teacher {url} was asked about {len(asked)} tokens and returned {len(entries)}")
    if not entries:
        return np.empty(0, np.float32)
    values, numbers, _ = zip(*entries, strict=True)
    log_probs = np.array(values, dtype=np.float64)  # None becomes NaN
    wrong = np.not_equal(numbers, asked) & np.not_equal(numbers, 0)  # SGLang reports the vocabulary's last id as 0
    for place in np.flatnonzero(wrong | ~np.isfinite(log_probs))[:1]:
        token = asked[place]
        if wrong[place]:
            raise RuntimeError(
                f"the teacher {url} was asked for token {token} at place {place} and returned {numbers[place]}"
            )
        raise RuntimeError(f"the teacher {url} returned {values[place]} as the log-probability of token {token}")
    return log_probs.astype(np.float32)
