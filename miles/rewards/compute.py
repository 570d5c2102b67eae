"""The rewards of samples, as flags and rows choose them. One that fails is counted apart, never taken for a zero."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any

from miles.rewards.built_in import BUILT_IN, built_in
from miles.rewards.custom import load_custom_group_reward, load_custom_reward
from miles.utils.errors import UserError
from miles.utils.json_values import as_json, json_entries, scalar
from miles.utils.user_code import described

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

logger = logging.getLogger(__name__)

_logged_errors: set[type[BaseException]] = set()


@dataclass(frozen=True)
class RewardCounts:
    """What became of the rewards of one call: samples = valid + abstained + errors. `check_errors` bounds the last."""

    samples: int
    abstained: int
    errors: int
    first_error: str | None


def load_reward(config: "RunConfig") -> Callable[..., Awaitable[Any]]:
    """The reward function that a checked configuration names, ready: call it before anything is started.

    With --use-opd it may name none: every response is worth 0 then. Nor where a function of the user's generates, which
    sets the rewards.

    Raises:
        ValueError: the built-in one lacks its package or sandbox here, or the custom one can't be used (see
            miles.rewards.custom).
    """
    if config.custom_rm_path is not None:
        load = load_custom_group_reward if config.group_rm else load_custom_reward
        return load(config.custom_rm_path)
    if config.rm_type is None:
        return _set_by_generation if config.generates_by_function else _no_reward
    BUILT_IN[config.rm_type].check_machine()
    return _built_in_reward


async def compute_rewards(config: "RunConfig", samples: list["Sample"], *, evaluation: bool = False) -> RewardCounts:
    """Set `reward` of every sample, all at once: a float, or None where the reward abstained or failed.

    A dict is kept as `metadata["reward"]` and reduced to its entry `config.reward_key`, with `evaluation` to
    `config.eval_reward_key`; bool and numpy scalars become floats. NaN, infinity, another type, what JSON can't hold,
    an exception and a timeout are errors; the first of each type is logged with its traceback, once in a process. With
    --group-rm an exception is the error of the whole group.
    """
    # Evaluation without a reward of the run's own has sets that each name theirs.
    reward_function = _built_in_reward if evaluation and not config.has_reward else load_reward(config)
    key = config.eval_reward_key if evaluation else config.reward_key
    flag = "--eval-reward-key" if evaluation else "--reward-key"
    values = await asyncio.gather(*(_values(reward_function, config, group) for group in _asked(config, samples)))
    values = [value for group in values for value in group]
    outcomes = [_outcome(sample, value, key, flag) for sample, value in zip(samples, values, strict=True)]
    errors = []
    for sample, outcome in zip(samples, outcomes, strict=True):
        if isinstance(outcome, Exception):
            errors.append(f"sample {sample.index} of group {sample.group_index}: {described(outcome)}")
            kind = type(outcome.__cause__ or outcome)
            if kind not in _logged_errors:
                _logged_errors.add(kind)
                logger.warning("the reward failed for %s; more like it are only counted", errors[-1], exc_info=outcome)
            outcome = None
        sample.reward = outcome
    return RewardCounts(
        samples=len(samples),
        abstained=sum(sample.reward is None for sample in samples) - len(errors),
        errors=len(errors),
        first_error=errors[0] if errors else None,
    )


def check_errors(counts: list[RewardCounts], bound: float) -> None:
    """Raise UserError if more than the share `bound` of all these samples failed (--max-reward-error-fraction)."""
    errors, samples = sum(count.errors for count in counts), sum(count.samples for count in counts)
    if errors > bound * samples:
        first = next(count.first_error for count in counts if count.errors)
        raise UserError(
            f"the reward failed for {errors} of {samples} samples; --max-reward-error-fraction allows {bound:g}. "
            f"The first: {first}"
        )


async def _no_reward(config: "RunConfig", sample: "Sample") -> float:
    return 0.0


async def _set_by_generation(config: "RunConfig", sample: "Sample") -> Any:
    """Asked only of samples whose reward the function that generated them has left open."""
    if sample.metadata.get("rm_type") is not None:
        return await _built_in_reward(config, sample)
    if config.use_opd:
        return await _no_reward(config, sample)
    raise UserError(
        "the function that generates samples set no reward, and there is neither --rm-type nor --custom-rm-path"
    )


async def _built_in_reward(config: "RunConfig", sample: "Sample") -> Any:
    chosen = sample.metadata.get("rm_type")
    reward = built_in(config.rm_type if chosen is None else chosen)
    reward.need_label(sample.label)
    for missing in reward.missing_flags(config):
        raise UserError(f"the reward {reward.name} {missing}")
    return await reward.judge(config, sample)


def _asked(config: "RunConfig", samples: Sequence["Sample"]) -> list[list["Sample"]]:
    """The samples of each call, in order: with --group-rm neighbours of one group, else one."""
    if config.group_rm:
        return [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.group_index)]
    return [[sample] for sample in samples]


async def _values(
    reward_function: Callable[..., Awaitable[Any]], config: "RunConfig", group: list["Sample"]
) -> list[Any]:
    """What the reward says of each sample of one call, or the exception that it raised."""
    try:
        if not config.group_rm:
            return [await reward_function(config, *group)]
        values = await reward_function(config, group)
        values = values.tolist() if hasattr(values, "tolist") else values  # numpy and torch
        if not isinstance(values, list | tuple) or len(values) != len(group):
            got = f"{len(values)}" if isinstance(values, list | tuple) else f"{values!r} ({type(values).__name__})"
            raise TypeError(f"a group reward must return a list of {len(group)} rewards, one a sample; it is {got}")
        return list(values)
    # A reward is foreign code: whatever it raises is counted, and stops the run above a bound.
    except Exception as error:
        return [error] * len(group)


def _outcome(sample: "Sample", value: Any, key: str | None, flag: str) -> float | None | Exception:
    # A reward of the user's may have written into the metadata, too.
    sample.metadata, problem = json_entries(sample.metadata, "metadata")
    if isinstance(value, Exception):
        return value
    try:
        if isinstance(value, dict):
            sample.metadata["reward"] = as_json(value, "the reward")
        if problem is not None:
            raise UserError(problem)
        return _as_float(value, key, flag)
    except (TypeError, ValueError) as error:
        return error


def _as_float(value: Any, key: str | None, flag: str) -> float | None:
    if isinstance(value, dict):
        if key not in value:
            says = "is not given" if key is None else f"names {key!r}"
            raise UserError(f"the reward is a dict with {', '.join(map(repr, value))}, and {flag} {says}")
        value = value[key]
    if value is None:
        return None
    value = scalar(value)
    if not isinstance(value, Real):
        raise TypeError(
            f"a reward must be a number, a dict of numbers or None; it is {value!r} ({type(value).__name__})"
        )
    if not isfinite(value):
        raise ValueError(f"the reward is {float(value)}")
    return float(value)
