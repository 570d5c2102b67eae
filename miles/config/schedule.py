"""When generation and training take place: in turns, or at the same time on different GPUs."""

from typing import ClassVar, Literal

from pydantic import Field

from miles.config.section import Section


class ScheduleConfig(Section):
    title: ClassVar[str] = "Schedule"

    one_step_ahead: bool = Field(
        False, description="Generate the next rollout while this one is trained on, on GPUs of its own."
    )
    fully_async: bool = Field(
        False, description="Generate all the time, on GPUs of its own, into a bounded buffer that training takes from."
    )
    update_weights_interval: int = Field(
        1, gt=0, description="Rollouts between weight syncs, with --one-step-ahead or --fully-async."
    )
    async_max_concurrent_samples: int | None = Field(
        None, gt=0, description="Samples being generated at most, with --fully-async. Unset: those of one rollout."
    )
    async_data_buffer_capacity_factor: float = Field(
        2.0, ge=1, description="Finished groups kept at most, in rollouts; generation waits above it. --fully-async."
    )
    async_unused_samples_handler: Literal["retry", "drop"] = Field(
        "retry",
        description="What becomes of the prompt of a group that --max-weight-staleness refuses: asked again, or "
        "counted and dropped. With --fully-async.",
    )
