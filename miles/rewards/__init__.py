"""Rewards, one file each: what a response is worth. A reward that fails is counted apart, never taken for a zero."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

from miles.config import RunConfig
from miles.rewards.custom import load_custom_reward
from miles.rewards.exact import exact_reward
from miles.rewards.math import check_installed, math_reward
from miles.utils.types import Sample

logger = logging.getLogger(__name__)

RewardFunction = Callable[[RunConfig, Sample], Awaitable[Any]]

BUILT_IN: dict[str, RewardFunction] = {"exact": exact_reward, "math": math_reward}


_logged_errors: set[type[Exception]] = set()


@dataclass(frozen=True)
class RewardCounts:
    """What became of the rewards of one call: samples = valid + abstained + errors. `check_errors` bounds the last."""

    samples: int
    abstained: int
    errors: int
    first_error: str | None


def load_reward(config: RunConfig) -> RewardFunction:
    """The reward function that config names, checked: call it before anything is started.

    Raises: ValueError if none or two are named, the built-in one misses its label or package, or the custom one
        can't be used (see miles.rewards.custom).
    """
    if (config.rm_type is None) == (config.custom_rm_path is None):
        raise ValueError(f"give exactly one of --rm-type ({', '.join(BUILT_IN)}) and --custom-rm-path (a dotted path)")
    if config.custom_rm_path is not None:
        return load_custom_reward(config.custom_rm_path)
    if config.label_key is None:
        raise ValueError(f"--rm-type {config.rm_type} compares with labels: name their column with --label-key")
    if config.rm_type == "math":
        check_installed()
    return BUILT_IN[config.rm_type]


async def compute_rewards(config: RunConfig, samples: list[Sample]) -> RewardCounts:
    """Set `reward` of every sample, all at once: a float, or None where the reward abstained or failed.

    A dict is reduced to its entry `config.reward_key`; bool and numpy scalars become floats. NaN, infinity, another
    type, an exception and a timeout are errors; the first of each type is logged with its traceback, once in a process.
    """
    reward_function = load_reward(config)
    outcomes = await asyncio.gather(*(_reward(reward_function, config, sample) for sample in samples))
    errors = []
    for sample, outcome in zip(samples, outcomes, strict=True):
        if isinstance(outcome, Exception):
            errors.append(f"sample {sample.index} of group {sample.group_index}: {type(outcome).__name__}: {outcome}")
            if type(outcome) not in _logged_errors:
                _logged_errors.add(type(outcome))
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
    """Raise RuntimeError if more than the share `bound` of all these samples failed (--max-reward-error-fraction)."""
    errors, samples = sum(count.errors for count in counts), sum(count.samples for count in counts)
    if errors > bound * samples:
        first = next(count.first_error for count in counts if count.errors)
        raise RuntimeError(
            f"the reward failed for {errors} of {samples} samples; --max-reward-error-fraction allows {bound:g}. "
            f"The first: {first}"
        )


async def _reward(reward_function: RewardFunction, config: RunConfig, sample: Sample) -> float | None | Exception:
    try:
        return _as_float(await reward_function(config, sample), config.reward_key)
    # A reward is foreign code: whatever it raises is counted, and stops the run above a bound.
    except Exception as error:
        return error


def _as_float(value: Any, reward_key: str | None) -> float | None:
    if isinstance(value, dict):
        if reward_key not in value:
            given = "is not given" if reward_key is None else f"names {reward_key!r}"
            raise ValueError(f"the reward is a dict with {', '.join(map(repr, value))}, and --reward-key {given}")
        value = value[reward_key]
    if value is None:
        return None
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(
            f"a reward must be a number, a dict of numbers or None; it is {value!r} ({type(value).__name__})"
        )
    if not isfinite(value):
        raise ValueError(f"the reward is {float(value)}")
    return float(value)
