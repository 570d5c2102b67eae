"""Functions of the user's own around a rollout: loaded and checked once, called with what they return checked.

Foreign code raises and returns anything. Each function here calls one hook, raises FunctionFailed that names its flag
and path where it fails and ValueError where its result, or what it wrote into samples, is not what it must be, and does
what Miles does by itself where there is no hook.
"""

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.config import RunConfig
from miles.config.names import flag_of
from miles.rollout.base_types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.generate_hub import CHECKS
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
from miles.rollout.train_data import batch_from
from miles.training.advantages.groups import counted_rewards, shape_rewards
from miles.training.batch import TrainBatch
from miles.training.custom import load_custom_loss, load_custom_tis
from miles.training.data_postprocess import load_data_postprocess
from miles.utils.dotted_path import load_function
from miles.utils.errors import UserError
from miles.utils.json_values import scalar, shown
from miles.utils.types import Sample

Groups = list[list[Sample]]
Generate = Callable[[RunConfig, Sample, dict[str, Any]], Awaitable[Sample | list[Sample]]]


@dataclass(frozen=True)
class Hooks:
    """The functions that the flags name, each None where its flag is not given."""

    rollout: Callable[..., Any] | None = None
    eval: Callable[..., Any] | None = None
    generate: Generate | None = None
    reward_post_process: Callable[..., Any] | None = None
    convert: Callable[..., Any] | None = None
    dynamic_filter: Callable[..., Any] | None = None
    buffer_filter: Callable[..., Any] | None = None
    sample_filter: Callable[..., Any] | None = None
    all_samples: Callable[..., Any] | None = None
    log_rollout: Callable[..., Any] | None = None
    log_eval: Callable[..., Any] | None = None


def load_hooks(config: RunConfig) -> Hooks:
    """Import and check every function that `config` names, the trainer's too.

    Raises:
        ValueError: one can't be imported, is (no) async function where it must (not) be, or doesn't take what it will
            be called with. The flag is named.
    """

    def load(
        path: str | None, field: str, *parameters: str, is_async: bool | None = False
    ) -> Callable[..., Any] | None:
        return None if path is None else load_function(flag_of(field), path, *parameters, is_async=is_async)

    for path, load_in_trainer in (
        (config.rollout_data_postprocess_path, load_data_postprocess),
        (config.custom_loss_function_path, load_custom_loss),
        (config.custom_tis_function_path, load_custom_tis),
    ):
        if path is not None:
            load_in_trainer(path)
    whole = ("config", "rollout_id", "data_source", "evaluation=")
    generate = config.custom_generate_function_path
    return Hooks(
        rollout=load(config.rollout_function_path, "rollout_function_path", *whole, is_async=None),
        eval=load(config.eval_function_path, "eval_function_path", *whole, is_async=None),
        generate=None if generate is None else load_generate(config, generate),
        reward_post_process=load(
            config.custom_reward_post_process_path, "custom_reward_post_process_path", "config", "samples"
        ),
        convert=load(
            config.custom_convert_samples_to_train_data_path,
            "custom_convert_samples_to_train_data_path",
            *("config", "samples"),
        ),
        dynamic_filter=load(config.dynamic_sampling_filter_path, "dynamic_sampling_filter_path", "config", "samples"),
        buffer_filter=load(
            config.buffer_filter_path, "buffer_filter_path", "config", "rollout_id", "buffer", "num_groups"
        ),
        sample_filter=load(config.rollout_sample_filter_path, "rollout_sample_filter_path", "config", "groups"),
        all_samples=load(
            config.rollout_all_samples_process_path,
            "rollout_all_samples_process_path",
            *("config", "groups", "data_source"),
        ),
        log_rollout=load(
            config.custom_rollout_log_function_path,
            "custom_rollout_log_function_path",
            *("rollout_id", "config", "samples", "metrics", "seconds"),
        ),
        log_eval=load(
            config.custom_eval_rollout_log_function_path,
            "custom_eval_rollout_log_function_path",
            *("rollout_id", "config", "data", "metrics"),
        ),
    )


def load_generate(config: RunConfig, path: str, flag: str = "--custom-generate-function-path") -> Generate:
    """The generate function at a dotted path that `flag` names, an evaluation set's perhaps.

    Raises:
        ValueError: as in `load_hooks`, or it is one of Miles' own and what it needs is missing in `config`.
    """
    function = load_function(flag, path, "config", "sample", "sampling_params", is_async=True)
    if path in CHECKS:
        CHECKS[path](config)
    return function


# Whole rollouts


async def run_rollout(hooks: Hooks, config: RunConfig, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """`hooks.rollout`'s rollout, its samples as lists; it may also return the groups alone.

    Raises:
        ValueError: it is not rollout_batch_size groups of n_samples_per_prompt trajectories, finished and consistent.
    """
    flag = flag_of("rollout_function_path")
    result = await hooks.rollout(config, rollout_id, data_source, evaluation=False)
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


async def run_eval(hooks: Hooks, config: RunConfig, rollout_id: int, data_source: Any) -> RolloutFnEvalOutput:
    """`hooks.eval`'s evaluation; called as `hooks.rollout`, with evaluation=True.

    Raises:
        ValueError: it is no RolloutFnEvalOutput with at least one finished sample for each name.
    """
    flag = flag_of("eval_function_path")
    result = await hooks.eval(config, rollout_id, data_source, evaluation=True)
    if not isinstance(result, RolloutFnEvalOutput):
        raise UserError(f"{flag} returned {shown(result)}; it must return a RolloutFnEvalOutput")
    if not isinstance(result.data, Mapping):
        raise UserError(f"{flag} returned data {shown(result.data)}; it must be a dict of lists of samples by name")
    data = {}
    for name, samples in result.data.items():
        data[name] = samples_in(flag, f"evaluation set {name!r}", samples)
        check_finished(flag, data[name])
    return RolloutFnEvalOutput(data, metrics_in(flag, result.metrics))


# One sample, one group


async def generate_pieces(
    generate: Generate, config: RunConfig, sample: Sample, sampling_params: dict[str, Any]
) -> list[Sample]:
    """What a generate function made of `sample`: one sample, or several pieces of its trajectory.

    Pieces get `group_index`, `index` and, if there are several, `rollout_id` of the sample's trajectory: they are told
    apart by their order.

    Raises:
        ValueError: the result is no Sample and no list of them, is empty, pending, or contradicts itself.
    """
    flag = flag_of("custom_generate_function_path")
    result = await generate(config, sample, sampling_params)
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


def keep_group(hooks: Hooks, config: RunConfig, group: Sequence[Sample]) -> DynamicFilterOutput:
    """Whether the dynamic filter keeps a finished group; without one, it is kept.

    Raises:
        ValueError: the filter returned neither a DynamicFilterOutput nor a bool.
    """
    if hooks.dynamic_filter is None:
        return DynamicFilterOutput(True)
    flag = flag_of("dynamic_sampling_filter_path")
    result = hooks.dynamic_filter(config, list(group))
    check_annotations(flag, group)
    keep, reason = (result.keep, result.reason) if isinstance(result, DynamicFilterOutput) else (result, None)
    keep = scalar(keep)
    if not isinstance(keep, bool):
        raise UserError(
            f"{flag} returned {shown(result)}; it must return a DynamicFilterOutput, or True to keep the group"
        )
    return DynamicFilterOutput(keep, reason)


def take_from_buffer(
    hooks: Hooks, config: RunConfig, rollout_id: int, buffer: Groups, num_groups: int
) -> tuple[Groups, Groups]:
    """Take at most `num_groups` groups out of `buffer`, in place; without a filter, the oldest.

    Returns:
        The groups taken, and those that the filter threw away: they are in the buffer no more, and were not returned.

    Raises:
        ValueError: the filter returned more, a group that was not in the buffer, or one that still is in it.
    """
    if hooks.buffer_filter is None:
        taken = buffer[:num_groups]
        del buffer[:num_groups]
        return taken, []
    flag, before = flag_of("buffer_filter_path"), list(buffer)
    result = hooks.buffer_filter(config, rollout_id, buffer, num_groups)
    check_annotations(flag, itertools.chain.from_iterable(before))
    if not isinstance(result, list | tuple):
        raise UserError(f"{flag} returned {shown(result)}; it must return a list of groups of the buffer")
    known, left, taken = ({id(group) for group in groups} for groups in (before, buffer, result))
    for name, groups, allowed in (("returned", result, known - left), ("left in the buffer", buffer, known)):
        ids = [id(group) for group in groups]
        if len(set(ids)) != len(ids) or not set(ids) <= allowed:
            raise UserError(
                f"{flag} {name} a group twice, one that it made itself, or one that is also elsewhere; each group must "
                "either stay in the buffer or be removed from it and returned"
            )
    if len(result) > num_groups:
        raise UserError(f"{flag} returned {len(result)} groups; it was asked for at most {num_groups}")
    return list(result), [group for group in before if id(group) not in left | taken]


# A collected rollout


def filter_samples(hooks: Hooks, config: RunConfig, groups: Sequence[Sequence[Sample]]) -> None:
    """Let the sample filter set `remove_sample` of what is about to be trained on.

    Raises:
        ValueError: it returned something, which would have no effect.
    """
    if hooks.sample_filter is None:
        return
    flag = flag_of("rollout_sample_filter_path")
    result = hooks.sample_filter(config, [list(group) for group in groups])
    check_annotations(flag, itertools.chain.from_iterable(groups))
    if result is not None:
        raise UserError(
            f"{flag} returned {shown(result)}; it must return nothing, and set "
            "remove_sample of the samples that are not to be trained on"
        )


def show_all_samples(hooks: Hooks, config: RunConfig, groups: Sequence[Sequence[Sample]], data_source: Any) -> None:
    """Show all finished groups of a rollout, those that a filter refused too, to the all-samples function."""
    if hooks.all_samples is not None:
        hooks.all_samples(config, [list(group) for group in groups], data_source)
        check_annotations(flag_of("rollout_all_samples_process_path"), itertools.chain.from_iterable(groups))


def shaped_rewards(
    hooks: Hooks, config: RunConfig, samples: Sequence[Sample]
) -> tuple[list[float | None], list[float]]:
    """The raw reward of each sample, None where it has none that counts, and the one that it is trained with.

    Raises:
        ValueError: the hook returned no such pair, or another number of rewards than of samples.
    """
    if hooks.reward_post_process is None:
        raw = counted_rewards(samples)
        shaped = shape_rewards(
            config.estimator,
            raw,
            [sample.group_index for sample in samples],
            [sample.trajectory for sample in samples],
            compare=not config.disable_rewards_normalization,
            std=not config.disable_grpo_std_normalization,
        )
        return raw, shaped.tolist()
    flag = flag_of("custom_reward_post_process_path")
    result = hooks.reward_post_process(config, list(samples))
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UserError(f"{flag} returned {shown(result)}; it must return two lists: raw and shaped rewards")
    raw, shaped = (
        rewards_in(flag, kind, values, samples) for kind, values in zip(("raw", "shaped"), result, strict=True)
    )
    if None in shaped:
        raise UserError(f"{flag}: shaped reward {shaped.index(None)} is None; each sample needs a finite number")
    return raw, shaped


def train_batch(
    hooks: Hooks,
    config: RunConfig,
    samples: Sequence[Sample],
    raw: Sequence[float | None] | None,
    rewards: Sequence[float] | None,
) -> TrainBatch:
    """The training batch of a rollout, as the convert hook makes it, or Miles.

    Args:
        raw, rewards: of `shaped_rewards`; None for supervised samples.

    Raises:
        ValueError: samples that can't be trained on, or what `miles.rollout.train_data.batch_from` refuses.
    """
    if rewards is not None and any(sample.rollout_log_probs is None for sample in samples):
        missing = [sample.index for sample in samples if sample.rollout_log_probs is None]
        raise UserError(
            f"{len(missing)} of {len(samples)} samples have no rollout_log_probs, sample {missing[0]} first: what "
            "generates a sample must set them, one a response token"
        )
    if hooks.convert is not None:
        flag = flag_of("custom_convert_samples_to_train_data_path")
        data = hooks.convert(config, list(samples))
        return batch_from(flag, data, samples, rewarded=rewards is not None)
    batch = TrainBatch.from_samples(samples, rewards)
    if raw is not None:
        batch = batch.with_columns(raw_reward=[float("nan") if reward is None else reward for reward in raw])
    return batch


def log_rollout(
    hooks: Hooks,
    config: RunConfig,
    rollout_id: int,
    samples: Sequence[Sample],
    metrics: Mapping[str, float],
    seconds: float,
) -> bool:
    """Show a rollout to the log function; whether it says that Miles' own metrics are left out."""
    if hooks.log_rollout is None:
        return False
    flag = flag_of("custom_rollout_log_function_path")
    result = hooks.log_rollout(rollout_id, config, list(samples), dict(metrics), seconds)
    return leaves_out(flag, result)


def log_eval(
    hooks: Hooks,
    config: RunConfig,
    rollout_id: int,
    data: Mapping[str, Sequence[Sample]],
    metrics: Mapping[str, float],
) -> bool:
    """Show an evaluation, its samples by set, to the log function; whether Miles' own metrics are left out."""
    if hooks.log_eval is None:
        return False
    flag = flag_of("custom_eval_rollout_log_function_path")
    result = hooks.log_eval(rollout_id, config, {name: list(part) for name, part in data.items()}, dict(metrics))
    return leaves_out(flag, result)
