"""How responses are drawn, and by what: Miles' own generate function, or the user's."""

import copy
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from miles.config import RunConfig
from miles.rollout import engine_pool
from miles.rollout.engine_pool import EnginesLost, RequestFailed
from miles.rollout.sample_buffer import ASKED
from miles.utils.errors import UserError
from miles.utils.tasks import all_of
from miles.utils.types import Sample
from miles.utils.user_code import FunctionFailed


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Args:
        temperature: 0 for the likeliest token.
        top_p, top_k: share of probability and number of tokens to draw from; 1.0 and -1 for all.
        max_response_len: most new tokens.
        max_context_len: most tokens of prompt and response together, or None.
        stop, stop_token_ids: texts and ids that end a response, besides the model's own end tokens.
        seed: each sample's own seed is made of this and its index; engines that sample deterministically honour it.
        min_new_tokens: fewest new tokens.
    """

    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    max_context_len: int | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    seed: str
    min_new_tokens: int = 0

    @classmethod
    def for_rollout(cls, config: RunConfig) -> "Sampling":
        """As `--rollout-*` says, where engines run."""
        assert config.rollout_max_response_len is not None, "a rule asks for it"
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

    def parameters(self, sample: Sample) -> dict[str, Any]:
        """SGLang's sampling parameters for one sample, all but the model's own end ids.

        Dict and lists are new each time: a generate function may change what it is given.

        `max_new_tokens` is what its response may still have: tokens that the model wrote (of mask 1) count against
        `max_response_len`, all tokens against `max_context_len`. It can be 0 where there is a response.

        Raises:
            ValueError: there is no room for any response.
        """
        written = sample.trained_length
        room = self.max_response_len - written
        if self.max_context_len is not None:
            room = min(room, self.max_context_len - len(sample.tokens))
        if room < 1 and sample.response_length == 0:
            raise UserError(
                f"sample {sample.index}: its prompt of {len(sample.tokens)} tokens leaves no room for a response "
                f"within {self.max_context_len} tokens (--rollout-max-context-len, --eval-max-context-len)"
            )
        digest = hashlib.blake2b(f"{self.seed} {sample.index}".encode(), digest_size=8).digest()
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": max(room, 0),
            "min_new_tokens": min(max(self.min_new_tokens - written, 0), max(room, 0)),
            "stop": copy.copy(self.stop),
            "stop_token_ids": copy.copy(self.stop_token_ids),
            "sampling_seed": int.from_bytes(digest) >> 1,  # an int64
        }


async def generate(config: RunConfig, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """Extends the sample by one response, see `EnginePool.complete`: what Miles does where no flag names another.

    Custom generate functions call it for each turn, with `max_new_tokens` of what they grant it. It returns the sample
    that it was given, of status COMPLETED, TRUNCATED, or ABORTED: then a custom function returns too, and is called
    again later.
    """
    await engine_pool.current().complete([sample], [sampling_params])
    return sample


Generated = list[list[Sample] | Exception]


@dataclass(frozen=True)
class OneRequest:
    """Miles' own: one attempt at all samples of a group at once, by one engine, which reads their prompt once.

    A call takes samples and the sampling parameters of each. It returns for each the pieces of its trajectory (here the
    sample, extended in place), or what its generation failed of, and raises EnginesLost where no engine is left.
    """

    together: ClassVar[bool] = True

    async def __call__(
        self, config: RunConfig, samples: Sequence[Sample], sampling_params: Sequence[dict[str, Any]]
    ) -> Generated:
        try:
            await engine_pool.current().complete(samples, sampling_params)
        except RequestFailed as error:
            missing = [place for place, sample in enumerate(samples) if not sample.is_finished]
            if len(missing) > 1:  # who is to blame is found out one by one
                again = await all_of([self(config, [samples[place]], [sampling_params[place]]) for place in missing])
                results = {place: result for place, [result] in zip(missing, again, strict=True)}
            else:
                results = dict.fromkeys(missing, error)
            return [results.get(place, [sample]) for place, sample in enumerate(samples)]
        return [[sample] for sample in samples]


@dataclass(frozen=True)
class EachAlone:
    """A generate function of the user's, as `miles.rollout.user_functions` calls it; called as `OneRequest` is.

    Each sample has a call, and a pace, of its own. It is given a copy, so that the group can be saved, and the sample
    be asked again, whatever becomes of it.
    """

    function: Callable[[RunConfig, Sample, dict[str, Any]], Awaitable[list[Sample]]]
    together: ClassVar[bool] = False

    async def __call__(
        self, config: RunConfig, samples: Sequence[Sample], sampling_params: Sequence[dict[str, Any]]
    ) -> Generated:
        calls = zip(samples, sampling_params, strict=True)
        return await all_of([self._attempt(config, sample, parameters) for sample, parameters in calls])

    async def _attempt(
        self, config: RunConfig, sample: Sample, sampling_params: dict[str, Any]
    ) -> list[Sample] | Exception:
        try:
            pieces = await self.function(config, copy.deepcopy(sample), sampling_params)
        except (FunctionFailed, UserError) as error:
            if isinstance(lost := error.__cause__, EnginesLost):
                raise lost from None
            return error
        # An agent renders its prompt itself.
        if len(pieces) > 1 or pieces[0].tokens[: len(sample.tokens)] != sample.tokens:
            pieces[0].metadata[ASKED] = sample.to_dict()
        return pieces
