"""The record that travels from the prompt file through generation and reward to the training batch."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass
class Sample:
    """One prompt and, once generated, one response to it.

    `tokens` holds the prompt's ids followed by the response's ids exactly as the engine saw and wrote them; before
    generation it holds the prompt only and `response_length` is 0. `loss_mask` and `rollout_log_probs` have one entry a
    response token, and so has `teacher_log_probs`, the log-probabilities under the teacher of on-policy distillation.
    Samples of one prompt share `group_index`; `index` is unique in a run. Pieces of one trajectory (a compacted
    context, sub-agents) are samples that share `rollout_id`, `group_index` and `reward`; they count once in every mean
    and stay in one optimizer step.
    """

    class Status(StrEnum):
        """How generation ended: by a stop, at the length limit, cut off by the engine, or by a failure of a tool."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    teacher_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def trajectory(self) -> int | None:
        """Which trajectory it is a piece of: `rollout_id`, or `index` where that is None."""
        return self.index if self.rollout_id is None else self.rollout_id

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    def validate(self) -> None:
        """Raise ValueError if the lengths of the sample's parts contradict each other."""
        name = f"sample {self.index} of group {self.group_index}"
        if not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(f"{name}: response_length {self.response_length} does not fit {len(self.tokens)} tokens")
        for part in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            values = getattr(self, part)
            if values is not None and len(values) != self.response_length:
                raise ValueError(
                    f"{name}: {part} has {len(values)} entries for a response of {self.response_length} tokens"
                )
