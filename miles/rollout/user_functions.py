"""The user's functions as Miles calls them, each with what the step of the rollout gets, and checked.

Foreign code raises and returns anything. Each raises FunctionFailed, which names flag and path, where the function
fails, and UserError where it returned, or wrote into samples, what it must not. The docstrings say what is asked for.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.config import RunConfig
from miles.rollout.base_types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.hook_results import (
    check_annotations,
    check_finished,
    check_members,
    check_sample,
    groups_in,
    leaves_out,
    metrics_in,
    rewards_in,
    samples_in,
)
from miles.rollout.sample_buffer import Group
from miles.rollout.train_data import batch_from
from miles.training.batch import TrainRows
from miles.utils.dotted_path import load_function
from miles.utils.errors import UserError
from miles.utils.json_values import scalar, shown
from miles.utils.types import Sample

Groups = Sequence[Sequence[Sample]]


@dataclass(frozen=True)
class UserFunction:
    """What a flag lets the user replace, or add.

    Args:
        flag: the flag that names the function.
        parameters: what the function takes, as `miles.utils.dotted_path.load_function` has them.
        is_async: as there.
        call: of (flag, the function, what the step of the rollout gets): calls it, and checks what it returns.
    """

    flag: str
    parameters: tuple[str, ...]
    is_async: bool | None
    call: Callable[..., Any]

    def __call__(self, function: Callable[..., Any], flag: str | None = None) -> Callable[..., Any]:
        """The step of a rollout that `function` makes; messages name `flag`, or this one's."""
        return functools.partial(self.call, flag or self.flag, function)

    def load(self, path: str | None, default: Any, flag: str | None = None) -> Any:
        """The step that the function at a dotted path makes; `default` where there is no path.

        Raises:
            ValueError: it can't be imported, is (no) async function where it must (not) be, or doesn't take what it
                will be called with. The flag is named.
        """
        if path is None:
            return default
        return self(load_function(flag or self.flag, path, *self.parameters, is_async=self.is_async), flag)


def _of(flag: str, *parameters: str, is_async: bool | None = False) -> Callable[[Callable[..., Any]], UserFunction]:
    return functools.partial(UserFunction, flag, parameters, is_async)


# Whole rollouts


@_of("--rollout-function-path", "config", "rollout_id", "data_source", "evaluation=", is_async=None)
async def rollout(flag: str, function: Any, config: RunConfig, rollout_id: int, data: Any) -> RolloutFnTrainOutput:
    """rollout_batch_size groups of n_samples_per_prompt finished trajectories; they may be returned alone."""
    result = await function(config, rollout_id, data, evaluation=False)
    if isinstance(result, list | tuple):
        result = RolloutFnTrainOutput(result)
    if not isinstance(result, RolloutFnTrainOutput):
        raise UserError(
            f"{flag} returned {shown(result)}; it must return a RolloutFnTrainOutput, or a list of groups of samples"
        )
    groups = groups_in(flag, result.samples)
    if len(groups) != config.rollout_batch_size:
        raise UserError(
            f"{flag} returned {len(groups)} groups; it must return --rollout-batch-size {config.rollout_batch_size}"
        )
    check_members(flag, groups, config.n_samples_per_prompt)
    return RolloutFnTrainOutput(groups, metrics_in(flag, result.metrics))


@_of("--eval-function-path", "config", "rollout_id", "data_source", "evaluation=", is_async=None)
async def evaluation(flag: str, function: Any, config: RunConfig, rollout_id: int, data: Any) -> RolloutFnEvalOutput:
    """At least one finished sample for each name."""
    result = await function(config, rollout_id, data, evaluation=True)
    if not isinstance(result, RolloutFnEvalOutput):
        raise UserError(f"{flag} returned {shown(result)}; it must return a RolloutFnEvalOutput")
    if not isinstance(result.data, Mapping):
        raise UserError(f"{flag} returned data {shown(result.data)}; it must be a dict of lists of samples by name")
    sets = {name: samples_in(flag, f"evaluation set {name!r}", part) for name, part in result.data.items()}
    for samples in sets.values():
        check_finished(flag, samples)
    return RolloutFnEvalOutput(sets, metrics_in(flag, result.metrics))


# One sample, one group


@_of("--custom-generate-function-path", "config", "sample", "sampling_params", is_async=True)
async def generate(
    flag: str, function: Any, config: RunConfig, sample: Sample, sampling_params: dict[str, Any]
) -> list[Sample]:
    """The sample, or several pieces of its trajectory, which get its indices: their order tells them apart."""
    result = await function(config, sample, sampling_params)
    pieces = samples_in(flag, f"sample {sample.index}", [result] if isinstance(result, Sample) else result)
    trajectory = sample.trajectory
    for piece in pieces:
        piece.group_index, piece.index = sample.group_index, sample.index
        if len(pieces) > 1:
            piece.rollout_id = trajectory
        if piece.status is Sample.Status.PENDING:
            raise UserError(f"{flag} left sample {sample.index} pending; it must set status to how generation ended")
        check_sample(flag, piece)
    return pieces


@_of("--dynamic-sampling-filter-path", "config", "samples")
def dynamic_filter(flag: str, function: Any, config: RunConfig, group: Sequence[Sample]) -> DynamicFilterOutput:
    """Whether a finished group is kept."""
    result = function(config, list(group))
    check_annotations(flag, group)
    keep, reason = (result.keep, result.reason) if isinstance(result, DynamicFilterOutput) else (result, None)
    keep = scalar(keep)
    if not isinstance(keep, bool):
        raise UserError(
            f"{flag} returned {shown(result)}; it must return a DynamicFilterOutput, or True to keep the group"
        )
    return DynamicFilterOutput(keep, reason)


@_of("--buffer-filter-path", "config", "rollout_id", "buffer", "num_groups")
def buffer_filter(
    flag: str, function: Any, config: RunConfig, rollout_id: int, buffer: list[Group], num_groups: int
) -> tuple[list[Group], list[Group]]:
    """At most `num_groups` groups, taken out of `buffer`, and those thrown away: neither returned nor left there."""
    before = list(buffer)
    result = function(config, rollout_id, buffer, num_groups)
    check_annotations(flag, itertools.chain.from_iterable(before))
    if not isinstance(result, list | tuple):
        raise UserError(f"{flag} returned {shown(result)}; it must return a list of groups of the buffer")
    known, left, returned = ({id(group) for group in groups} for groups in (before, buffer, result))
    for name, groups, allowed in (("returned", result, known - left), ("left in the buffer", buffer, known)):
        ids = [id(group) for group in groups]
        if len(set(ids)) != len(ids) or not set(ids) <= allowed:
            raise UserError(
                f"{flag} {name} a group twice, one that it made itself, or one that is also elsewhere; each group must "
                "either stay in the buffer or be removed from it and returned"
            )
    if len(result) > num_groups:
        raise UserError(f"{flag} returned {len(result)} groups; it was asked for at most {num_groups}")
    return list(result), [group for group in before if id(group) not in left | returned]


# A collected rollout


@_of("--rollout-sample-filter-path", "config", "groups")
def sample_filter(flag: str, function: Any, config: RunConfig, groups: Groups) -> None:
    """May set `remove_sample` of what is about to be trained on; anything returned would have no effect."""
    result = function(config, [list(group) for group in groups])
    check_annotations(flag, itertools.chain.from_iterable(groups))
    if result is not None:
        raise UserError(
            f"{flag} returned {shown(result)}; it must return nothing, and set "
            "remove_sample of the samples that are not to be trained on"
        )


@_of("--rollout-all-samples-process-path", "config", "groups", "data_source")
def all_samples(flag: str, function: Any, config: RunConfig, groups: Groups, data: Any) -> None:
    """Sees all finished groups of a rollout, those that a filter refused too."""
    function(config, [list(group) for group in groups], data)
    check_annotations(flag, itertools.chain.from_iterable(groups))


@_of("--custom-reward-post-process-path", "config", "samples")
def reward_post_process(
    flag: str, function: Any, config: RunConfig, samples: Sequence[Sample]
) -> tuple[list[float | None], list[float]]:
    """Raw and shaped rewards, one of each a sample."""
    result = function(config, list(samples))
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UserError(f"{flag} returned {shown(result)}; it must return two lists: raw and shaped rewards")
    raw, shaped = (
        rewards_in(flag, kind, values, samples) for kind, values in zip(("raw", "shaped"), result, strict=True)
    )
    rewards = [reward for reward in shaped if reward is not None]
    if len(rewards) < len(shaped):
        raise UserError(f"{flag}: shaped reward {shaped.index(None)} is None; each sample needs a finite number")
    return raw, rewards


@_of("--custom-convert-samples-to-train-data-path", "config", "samples")
def convert(
    flag: str, function: Any, config: RunConfig, samples: Sequence[Sample], raw: Any, rewards: Any
) -> TrainRows:
    """The training batch of what is returned. The function shapes rewards itself, if samples have any."""
    return batch_from(flag, function(config, list(samples)), samples, rewarded=rewards is not None)


@_of("--custom-rollout-log-function-path", "rollout_id", "config", "samples", "metrics", "seconds")
def log_rollout(
    flag: str, function: Any, config: RunConfig, rollout_id: int, samples: Any, metrics: Any, seconds: float
) -> bool:
    """Sees a rollout; whether Miles' own metrics are left out."""
    return leaves_out(flag, function(rollout_id, config, list(samples), dict(metrics), seconds))


@_of("--custom-eval-rollout-log-function-path", "rollout_id", "config", "data", "metrics")
def log_eval(flag: str, function: Any, config: RunConfig, rollout_id: int, sets: Any, metrics: Any) -> bool:
    """Sees the samples of an evaluation by set; whether Miles' own metrics are left out."""
    sets = {name: list(samples) for name, samples in sets.items()}
    return leaves_out(flag, function(rollout_id, config, sets, dict(metrics)))
