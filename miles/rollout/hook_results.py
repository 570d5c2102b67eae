"""What functions of the user's own must return: each check raises ValueError that names the flag and what came."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any

from miles.utils.columns import columns_of
from miles.utils.errors import UserError
from miles.utils.json_values import as_json, scalar, shown
from miles.utils.types import Sample


def samples_in(flag: str, what: str, samples: Any) -> list[Sample]:
    """`what` (a group, a set) as a list of one or more different samples."""
    if not isinstance(samples, list | tuple) or not samples:
        raise UserError(f"{flag}: {what} is {shown(samples)}; it must be a list of at least one Sample")
    for sample in samples:
        if not isinstance(sample, Sample):
            raise UserError(f"{flag}: {what} holds {shown(sample)}; it must hold Samples only")
    if len({id(sample) for sample in samples}) != len(samples):
        raise UserError(f"{flag}: {what} holds one Sample object twice; each sample must be one of its own")
    return list(samples)


def groups_in(flag: str, groups: Any) -> list[list[Sample]]:
    """The groups as lists."""
    if not isinstance(groups, list | tuple):
        raise UserError(f"{flag} returned samples {shown(groups)}; they must be a list of groups of samples")
    return [samples_in(flag, f"group {place}", group) for place, group in enumerate(groups)]


def check_finished(flag: str, samples: Sequence[Sample]) -> None:
    """Generation has ended for each, in one way or another, and each is as `check_sample` wants it."""
    for sample in samples:
        if not sample.is_finished:
            raise UserError(
                f"{flag} returned sample {sample.index} of group {sample.group_index} with status {sample.status}; it "
                f"must be one of completed, failed, truncated"
            )
        check_sample(flag, sample)


def check_sample(flag: str, sample: Sample) -> None:
    """It agrees with itself, its reward is a finite number or None, and all of it can be saved.

    Numpy's and torch's numbers and arrays in it become Python's. What is an array list holds nothing but numbers.
    """
    name, arrays = _name(sample), columns_of(type(sample))
    for field in dataclasses.fields(sample):
        if field.name not in arrays and field.name not in ("reward", "status"):
            setattr(sample, field.name, as_json(getattr(sample, field.name), f"{flag}: {field.name} of {name}"))
    if sample.status not in list(Sample.Status):
        raise UserError(
            f"{flag}: the status of {name} is {shown(sample.status)}; it must be one of {', '.join(Sample.Status)}"
        )
    sample.status = Sample.Status(sample.status)
    sample.validate()
    _check_reward(flag, sample)


def check_annotations(flag: str, samples: Iterable[Sample]) -> None:
    """`check_sample` of what a function that looks at finished samples may write down: metadata and rewards."""
    for sample in samples:
        sample.metadata = as_json(sample.metadata, f"{flag}: metadata of {_name(sample)}")
        _check_reward(flag, sample)


def _check_reward(flag: str, sample: Sample) -> None:
    reward = scalar(sample.reward)
    if reward is not None and not (isinstance(reward, Real) and isfinite(reward)):
        raise UserError(f"{flag}: the reward of {_name(sample)} is {shown(reward)}; it must be a finite number or None")
    sample.reward = None if reward is None else float(reward)


def _name(sample: Sample) -> str:
    return f"sample {sample.index} of group {sample.group_index}"


def check_members(flag: str, groups: Sequence[Sequence[Sample]], size: int) -> None:
    """Each group has `size` trajectories under one group_index that no other has; nor is one of them twice there."""
    group_of: dict[int | None, int] = {}
    trajectories: set[int | None] = set()
    for place, group in enumerate(groups):
        check_finished(flag, group)
        members = {sample.trajectory for sample in group}
        indices = {sample.group_index for sample in group}
        if len(indices) != 1 or None in indices or None in members:
            raise UserError(
                f"{flag}: the samples of group {place} have the group_index {sorted(indices, key=str)} and the index "
                f"{sorted(members, key=str)}; a group shares one group_index, and its samples have an index"
            )
        if len(members) != size:
            raise UserError(
                f"{flag}: group {place} has {len(members)} trajectories in {len(group)} samples; it must have "
                f"--n-samples-per-prompt {size}"
            )
        [group_index] = indices
        if (other := group_of.setdefault(group_index, place)) != place:
            raise UserError(f"{flag}: the groups {other} and {place} share group_index {group_index}")
        if twice := sorted(index for index in members & trajectories if index is not None):
            raise UserError(f"{flag}: trajectory {twice[0]} is in group {place} and in one before it")
        trajectories |= members


def metrics_in(flag: str, metrics: Any) -> dict[str, float]:
    """Metrics as floats; None for none."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UserError(f"{flag} returned metrics {shown(metrics)}; they must be a dict of numbers by name")
    numbers = {name: scalar(value) for name, value in metrics.items()}
    for name, value in numbers.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            raise UserError(f"{flag} returned the metric {name!r}: {shown(value)}; it must be a number under a name")
    return {name: float(value) for name, value in numbers.items()}


def rewards_in(flag: str, kind: str, values: Any, samples: Sequence[Sample]) -> list[float | None]:
    """A finite number or None for each sample; `kind` is raw or shaped."""
    values = values.tolist() if hasattr(values, "tolist") else values  # numpy and torch
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        got = f"{len(values)}" if isinstance(values, list | tuple) else shown(values)
        raise UserError(f"{flag} returned {got} {kind} rewards; it must return a list of {len(samples)}, one a sample")
    for sample, value in zip(samples, values, strict=True):
        if value is not None and not (isinstance(value, Real) and isfinite(value)):
            raise UserError(f"{flag}: the {kind} reward of sample {sample.index} is {shown(value)}, no finite number")
    return [None if value is None else float(value) for value in values]


def leaves_out(flag: str, result: Any) -> bool:
    """Whether a log function wants Miles' own metrics left out; nothing and False are no."""
    result = scalar(result)
    if result is not None and not isinstance(result, bool):
        raise UserError(f"{flag} returned {shown(result)}; it must return True to leave out Miles' own metrics")
    return bool(result)
