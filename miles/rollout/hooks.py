"""The function of each step of a rollout: Miles' own, or the user's where a flag names one."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.config import RunConfig
from miles.rollout import user_functions
from miles.rollout.base_types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.filter_hub.dynamic_sampling_filters import keep_every_group
from miles.rollout.generate import EachAlone, OneRequest
from miles.rollout.generate_hub import CHECKS
from miles.rollout.reward_shaping import shaped_rewards
from miles.rollout.sample_buffer import Group, oldest_first
from miles.rollout.train_data import train_batch
from miles.rollout.user_functions import Groups
from miles.training.batch import TrainRows
from miles.training.custom import load_custom_loss, load_custom_tis
from miles.training.data_postprocess import load_data_postprocess
from miles.utils.types import Sample


def _does_nothing(*arguments: Any) -> None:
    """Where only the user may want something."""


def _leaves_nothing_out(*arguments: Any) -> bool:
    return False


@dataclass(frozen=True)
class Hooks:
    """What is called at each step of a rollout; all but the first two are Miles' own where no flag names another.

    Attributes:
        rollout: makes a whole rollout of (config, rollout_id, data source). None: the collector does, or what there is
            without engines.
        evaluate: makes a whole evaluation, of the same. None: the evaluation sets are sampled.
        generate: makes responses of the samples of a group.
        keep_group: whether (config, finished group) is trained on.
        take_from_buffer: takes out of (config, rollout_id, buffer, number of groups): returns those that it took and
            those that it threw away.
        filter_samples: may mark samples of (config, groups) as removed.
        show_all_samples: sees (config, groups, data source), filtered groups too.
        shape_rewards: makes of (config, samples) the raw rewards and those that are trained with.
        make_batch: makes a training batch of (config, samples, raw rewards, shaped ones).
        log_rollout: sees (config, rollout_id, samples, metrics, seconds); whether Miles' own metrics are left out.
        log_eval: sees (config, rollout_id, samples by set, metrics); whether Miles' own metrics are left out.
    """

    rollout: Callable[[RunConfig, int, Any], Awaitable[RolloutFnTrainOutput]] | None = None
    evaluate: Callable[[RunConfig, int, Any], Awaitable[RolloutFnEvalOutput]] | None = None
    generate: OneRequest | EachAlone = OneRequest()
    keep_group: Callable[[RunConfig, Sequence[Sample]], DynamicFilterOutput] = keep_every_group
    take_from_buffer: Callable[[RunConfig, int, list[Group], int], tuple[list[Group], list[Group]]] = oldest_first
    filter_samples: Callable[[RunConfig, Groups], None] = _does_nothing
    show_all_samples: Callable[[RunConfig, Groups, Any], None] = _does_nothing
    shape_rewards: Callable[[RunConfig, Sequence[Sample]], tuple[list[float | None], list[float]]] = shaped_rewards
    make_batch: Callable[
        [RunConfig, Sequence[Sample], Sequence[float | None] | None, Sequence[float] | None], TrainRows
    ] = train_batch
    log_rollout: Callable[[RunConfig, int, Sequence[Sample], Mapping[str, float], float], bool] = _leaves_nothing_out
    log_eval: Callable[[RunConfig, int, Mapping[str, Sequence[Sample]], Mapping[str, float]], bool] = (
        _leaves_nothing_out
    )


def load_hooks(config: RunConfig, tokenizer: Any) -> Hooks:
    """Import and check every function that `config` names, the trainer's too.

    Args:
        config: the run's configuration.
        tokenizer: the checkpoint's, which Miles' own generate functions for conversations are checked with.

    Raises:
        ValueError: one can't be imported, is (no) async function where it must (not) be, or doesn't take what it will
            be called with. The flag is named.
    """
    for path, load_in_trainer in (
        (config.rollout_data_postprocess_path, load_data_postprocess),
        (config.custom_loss_function_path, load_custom_loss),
        (config.custom_tis_function_path, load_custom_tis),
    ):
        if path is not None:
            load_in_trainer(path)
    users, default = user_functions, Hooks()
    return Hooks(
        rollout=users.rollout.load(config.rollout_function_path, default.rollout),
        evaluate=users.evaluation.load(config.eval_function_path, default.evaluate),
        generate=load_generate(config, tokenizer, config.custom_generate_function_path),
        keep_group=users.dynamic_filter.load(config.dynamic_sampling_filter_path, default.keep_group),
        take_from_buffer=users.buffer_filter.load(config.buffer_filter_path, default.take_from_buffer),
        filter_samples=users.sample_filter.load(config.rollout_sample_filter_path, default.filter_samples),
        show_all_samples=users.all_samples.load(config.rollout_all_samples_process_path, default.show_all_samples),
        shape_rewards=users.reward_post_process.load(config.custom_reward_post_process_path, default.shape_rewards),
        make_batch=users.convert.load(config.custom_convert_samples_to_train_data_path, default.make_batch),
        log_rollout=users.log_rollout.load(config.custom_rollout_log_function_path, default.log_rollout),
        log_eval=users.log_eval.load(config.custom_eval_rollout_log_function_path, default.log_eval),
    )


def load_generate(
    config: RunConfig, tokenizer: Any, path: str | None, flag: str = user_functions.generate.flag
) -> OneRequest | EachAlone:
    """What generates by the function at a dotted path that `flag` names, an evaluation set's perhaps; None: Miles' own.

    Raises:
        ValueError: as in `load_hooks`, or it is one of `miles.rollout.generate_hub` and what it needs is missing.
    """
    if path is None:
        return OneRequest()
    function = user_functions.generate.load(path, None, flag)
    if path in CHECKS:
        CHECKS[path](config, tokenizer)
    return EachAlone(function)
