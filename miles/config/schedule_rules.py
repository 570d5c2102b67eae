"""What the schedule of a configuration must satisfy."""

from collections.abc import Iterator

from miles.config.names import flag_of
from miles.config.schedule import ScheduleConfig
from miles.config.values import Values


def _one_schedule(v: Values) -> Iterator[str]:
    if v.one_step_ahead and v.fully_async:
        yield (
            "--one-step-ahead and --fully-async are two schedules: the first makes one rollout ahead, the second makes "
            "samples all the time; drop one"
        )


def _own_gpus(v: Values) -> Iterator[str]:
    if v.colocate and (v.one_step_ahead or v.fully_async):
        flag = "--one-step-ahead" if v.one_step_ahead else "--fully-async"
        yield (
            f"{flag} generates while the trainer computes, and with --colocate both need the same GPUs; give the "
            "engines their own with --rollout-num-gpus in place of --colocate, or drop it"
        )


def _sync_interval(v: Values) -> Iterator[str]:
    interval = v.update_weights_interval
    if interval > 1 and not (v.one_step_ahead or v.fully_async) and v.needs_engines and v.needs_trainer:
        yield (
            f"--update-weights-interval {interval} needs --one-step-ahead or --fully-async: in turns, each rollout is "
            "generated with the weights of the last; add one, or drop it"
        )


def _whole_group(v: Values) -> Iterator[str]:
    most, size = v.async_max_concurrent_samples, v.n_samples_per_prompt
    if most is not None and most < size:
        yield (
            f"--async-max-concurrent-samples {most} is less than one group of --n-samples-per-prompt {size}; give at "
            f"least {size}"
        )


def _whole_rollouts_of_the_user(v: Values) -> Iterator[str]:
    if v.fully_async and v.rollout_function_path is not None:
        yield (
            f"--rollout-function-path {v.rollout_function_path} makes a whole rollout when it is asked, and "
            "--fully-async makes one group after the other; drop one, or give --one-step-ahead"
        )


SCHEDULE_RULES = (_one_schedule, _own_gpus, _sync_interval, _whole_group, _whole_rollouts_of_the_user)


def schedule_warnings(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    if not v.needs_engines:
        return  # so that a debug mode can be added to any command line
    if not v.fully_async:
        for name in (
            "async_max_concurrent_samples",
            "async_data_buffer_capacity_factor",
            "async_unused_samples_handler",
        ):
            if (value := getattr(v, name)) != ScheduleConfig.model_fields[name].default:
                yield f"{flag_of(name)} {value} has no effect without --fully-async"
    elif v.async_unused_samples_handler == "drop" and v.max_weight_staleness is None:
        yield "--async-unused-samples-handler drop has no effect without --max-weight-staleness: no group is refused"
