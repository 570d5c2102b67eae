"""When generation and training take place: in turns, or at the same time on different GPUs."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.effect import OnlyWith, both_run, engines_run
from miles.config.section import Derived, Section, derives, rule
from miles.config.values import Values

_ASYNC = OnlyWith("--fully-async", where=engines_run, warns=True)


class ScheduleConfig(Section):
    title: ClassVar[str] = "Schedule"

    one_step_ahead: bool = Field(
        False, description="Generate the next rollout while this one is trained on, on GPUs of its own."
    )
    fully_async: bool = Field(
        False, description="Generate all the time, on GPUs of its own, into a bounded buffer that training takes from."
    )
    update_weights_interval: Annotated[
        int,
        OnlyWith(
            "--one-step-ahead or --fully-async",
            "since in turns each rollout is generated with the weights of the last",
            where=both_run,
        ),
    ] = Field(1, gt=0, description="Rollouts between weight syncs, with --one-step-ahead or --fully-async.")
    async_max_concurrent_samples: Annotated[int | None, _ASYNC] = Field(
        None, gt=0, description="Samples being generated at most, with --fully-async. Unset: those of one rollout."
    )
    async_data_buffer_capacity_factor: Annotated[float, _ASYNC] = Field(
        2.0, ge=1, description="Finished groups kept at most, in rollouts; generation waits above it. --fully-async."
    )
    async_unused_samples_handler: Annotated[
        Literal["retry", "drop"],
        _ASYNC,
        OnlyWith(
            "--max-weight-staleness",
            "by which groups are refused",
            warns=True,
            where=lambda v: v.fully_async,
        ),
    ] = Field(
        "retry",
        description="What becomes of the prompt of a group that --max-weight-staleness refuses: asked again, or "
        "counted and dropped. With --fully-async.",
    )


@derives("one_step_ahead", "fully_async")
def _nothing_to_overlap(v: Values) -> Iterator[Derived]:
    """So that a debug mode can be added to any command line."""
    for name in ("one_step_ahead", "fully_async"):
        if getattr(v, name) and not v.needs_engines:
            yield name, False, f"{v.lone_side}"


@derives("async_max_concurrent_samples")
def _concurrent_samples(v: Values) -> Iterator[Derived]:
    if v.async_max_concurrent_samples is None and v.fully_async:
        yield "async_max_concurrent_samples", v.samples_per_rollout, "--fully-async: the samples of a rollout"


@rule
def _one_schedule(v: Values) -> Iterator[str]:
    if v.one_step_ahead and v.fully_async:
        yield (
            "--one-step-ahead and --fully-async are two schedules: the first makes one rollout ahead, the second makes "
            "samples all the time; drop one"
        )


@rule
def _own_gpus(v: Values) -> Iterator[str]:
    if v.colocate and (v.one_step_ahead or v.fully_async):
        flag = "--one-step-ahead" if v.one_step_ahead else "--fully-async"
        yield (
            f"{flag} generates while the trainer computes, and with --colocate both need the same GPUs; give the "
            "engines their own with --rollout-num-gpus in place of --colocate, or drop it"
        )


@rule
def _whole_group(v: Values) -> Iterator[str]:
    most, size = v.async_max_concurrent_samples, v.n_samples_per_prompt
    if most is not None and most < size:
        yield (
            f"--async-max-concurrent-samples {most} is less than one group of --n-samples-per-prompt {size}; give at "
            f"least {size}"
        )


@rule
def _whole_rollouts_of_the_user(v: Values) -> Iterator[str]:
    if v.fully_async and v.rollout_function_path is not None:
        yield (
            f"--rollout-function-path {v.rollout_function_path} makes a whole rollout when it is asked, and "
            "--fully-async makes one group after the other; drop one, or give --one-step-ahead"
        )
