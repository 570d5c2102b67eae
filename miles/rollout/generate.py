"""Sampling: groups of prompts go to the engines as token ids and come back as ids with log-probabilities."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.backends.sglang_utils.client import SGLangClient, SGLangError
from miles.config import RunConfig
from miles.rollout.slots import Slots
from miles.utils.types import Sample

WATCH_SECONDS = 3.0


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Args:
        temperature: 0 for the likeliest token.
        top_p, top_k: share of probability and number of tokens to draw from; 1.0 and -1 for all.
        max_response_len: most new tokens.
        max_context_len: most tokens of prompt and response together, or None.
        stop, stop_token_ids: texts and ids that end a response, besides the model's own end token.
        seed: each sample's own seed is made of this and its index; engines that sample deterministically honour it.
    """

    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    max_context_len: int | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    seed: str

    @classmethod
    def for_rollout(cls, config: RunConfig) -> "Sampling":
        """As `--rollout-*` says."""
        return cls(
            config.rollout_temperature,
            config.rollout_top_p,
            config.rollout_top_k,
            config.rollout_max_response_len,
            config.rollout_max_context_len,
            config.rollout_stop,
            config.rollout_stop_token_ids,
            f"rollout {config.seed}",
        )

    @classmethod
    def for_eval(cls, config: RunConfig, name: str) -> "Sampling":
        """As `--eval-*` says, for the evaluation set `name`."""
        return cls(
            config.eval_temperature,
            config.eval_top_p,
            config.eval_top_k,
            config.eval_max_response_len,
            config.rollout_max_context_len,
            config.rollout_stop,
            config.rollout_stop_token_ids,
            f"eval {name} {config.seed}",
        )

    def parameters(self, sample: Sample) -> dict[str, object]:
        """SGLang's sampling parameters for one sample, all but the ids that end it."""
        room = self.max_response_len
        if self.max_context_len is not None:
            room = min(room, self.max_context_len - len(sample.tokens))
        if room < 1:
            raise ValueError(
                f"sample {sample.index}: its prompt of {len(sample.tokens)} tokens leaves no room for a response "
                f"within --rollout-max-context-len {self.max_context_len}"
            )
        digest = hashlib.blake2b(f"{self.seed} {sample.index}".encode(), digest_size=8).digest()
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": room,
            "stop": self.stop,
            "sampling_seed": int.from_bytes(digest) >> 1,  # an int64
        }


class GroupGenerator:
    """Samples groups on one or more engines: a request a group, to the engine with the fewest samples in flight.

    Args:
        config: the run's configuration.
        clients: one an engine, or one of a router.
        limit: samples in flight at most, of each client.
        tokenizer: for the text of a response.
        check_engines: raises, with the reason, if an engine has died; called while requests run.
    """

    def __init__(
        self,
        config: RunConfig,
        clients: Sequence[SGLangClient],
        limit: int,
        tokenizer: Any,
        check_engines: Callable[[], Awaitable[None]],
    ) -> None:
        self._slots = Slots(clients, limit)
        self._tokenizer = tokenizer
        self._end_ids = end_token_ids(config.hf_checkpoint, tokenizer)
        self._check_engines = check_engines
        self._retries = config.rollout_request_retries
        self._skip_special_tokens = config.rollout_skip_special_tokens

    async def run(
        self,
        groups: Sequence[list[Sample]],
        sampling: Sampling,
        finish: Callable[[list[Sample]], Awaitable[None]],
    ) -> None:
        """Complete all samples in place; each group goes to `finish` as soon as it is complete.

        The first error of a request, of `finish`, or of the engines ends all of it: nothing is left running.
        """
        tasks = [asyncio.create_task(self._run_group(group, sampling, finish)) for group in groups]
        watch = asyncio.create_task(self._watch())
        work = asyncio.gather(*tasks)
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            await (work if work.done() else watch)
        finally:
            for task in (*tasks, watch):
                task.cancel()
            await asyncio.gather(*tasks, watch, work, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self._check_engines()

    async def _run_group(
        self, group: list[Sample], sampling: Sampling, finish: Callable[[list[Sample]], Awaitable[None]]
    ) -> None:
        missing = group
        for _ in range(self._retries + 1):
            missing = await self._request(missing, sampling)
            if not missing:
                await finish(group)
                return
        raise RuntimeError(
            f"the engine aborted sample(s) {[sample.index for sample in missing]} of group {group[0].group_index} in "
            f"each of {self._retries + 1} attempts (--rollout-request-retries {self._retries})"
        )

    async def _request(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        """Complete `samples` by one request; returns those that the engine aborted, unchanged."""
        stop_ids = self._end_ids.union(sampling.stop_token_ids or ())
        parameters = [sampling.parameters(sample) | {"stop_token_ids": sorted(stop_ids)} for sample in samples]
        async with self._slots.take(len(samples)) as client:
            try:
                replies = await client.generate([sample.tokens for sample in samples], parameters)
            except SGLangError:
                await self._check_engines()  # a dead engine says more than a lost connection
                raise
        aborted = []
        for sample, reply in zip(samples, replies, strict=True):
            reason = reply["meta_info"]["finish_reason"]["type"]
            if reason == "abort":
                aborted.append(sample)
            elif reason not in ("stop", "length"):
                raise RuntimeError(f"sample {sample.index}: the engine reports an unknown finish reason {reason!r}")
            else:
                self._complete(sample, reply, stop_ids, sampling.stop or ())
        return aborted

    def _complete(self, sample: Sample, reply: dict, stop_ids: frozenset[int], stop_texts: Sequence[str]) -> None:
        meta = reply["meta_info"]
        ids = reply["output_ids"]
        log_probs = [log_prob for log_prob, _, _ in meta["output_token_logprobs"]]
        if not 0 < len(ids) == len(log_probs) == meta["completion_tokens"]:
            raise RuntimeError(
                f"sample {sample.index}: the engine returned {len(ids)} ids, {len(log_probs)} log-probabilities and "
                f"counts {meta['completion_tokens']} new tokens"
            )
        # What ended the response is no part of its text: an end token, or a stop text and what its token has behind it.
        ended_by_id = ids[-1] in stop_ids
        text = self._tokenizer.decode(ids[:-1] if ended_by_id else ids, skip_special_tokens=self._skip_special_tokens)
        cut = min((place for place in map(text.find, stop_texts) if place >= 0), default=None)
        # SGLang reports `length` for whatever stands at the limit, an end token too.
        ended = ended_by_id or cut is not None or meta["finish_reason"]["type"] == "stop"

        sample.tokens = sample.tokens + ids
        sample.response = text[:cut]
        sample.response_length = len(ids)
        sample.loss_mask = [1] * len(ids)
        sample.rollout_log_probs = log_probs
        sample.weight_versions.append(meta["weight_version"])
        sample.status = Sample.Status.COMPLETED if ended else Sample.Status.TRUNCATED


def end_token_ids(checkpoint: str | Path, tokenizer: Any) -> frozenset[int]:
    """The ids that end a response: those of config.json and generation_config.json, and the tokenizer's `eos_token`."""
    ids = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = Path(checkpoint) / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [value])
    return frozenset(ids - {None})
