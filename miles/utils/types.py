"""The record that travels from the prompt file through generation and reward to the training batch."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import numpy as np

from miles.utils.array_list import ArrayList
from miles.utils.columns import ArrayField, columns_of
from miles.utils.errors import UserError


@dataclass
class Sample:
    """One prompt and, once generated, one response to it.

    `tokens` holds the prompt's ids followed by the response's ids exactly as the engine saw and wrote them; before
    generation it holds the prompt only and `response_length` is 0. `loss_mask` and `rollout_log_probs` have one entry a
    response token, and so has `teacher_log_probs`, the log-probabilities under the teacher of on-policy distillation.
    These four are `ArrayList`s: they take any list, tuple, array or tensor of numbers, and read as lists.
    `weight_versions` has the version of the weights of each call of an engine that wrote something, in order, and
    `weight_version_lengths` how many response tokens each stands for: what it wrote, and before that what others (a
    tool) added since the call before. What was added after the last call belongs to no version.
    Samples of one prompt share `group_index`; `index` is unique in a run, but for pieces of one trajectory (a compacted
    context, sub-agents): they share `index`, `rollout_id`, `group_index` and `reward`, count once in every mean and
    stay in one optimizer step. `metadata` holds what JSON can.
    """

    class Status(StrEnum):
        """How generation ended: by a stop, at the length limit, cut off by Miles (it can go on), or by a failure.

        PENDING and ABORTED are unfinished: there is something left to generate.
        """

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: ArrayField[ArrayList] = ArrayField(np.int32, "token", required=True)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: ArrayField[ArrayList | None] = ArrayField(np.int8, "response_token", column="loss_masks")
    weight_versions: list[str] = field(default_factory=list)
    weight_version_lengths: list[int] = field(default_factory=list)
    rollout_log_probs: ArrayField[ArrayList | None] = ArrayField(np.float32, "response_token")
    teacher_log_probs: ArrayField[ArrayList | None] = ArrayField(np.float32, "response_token")
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The sample that `to_dict` wrote; what is missing has its default.

        Raises:
            ValueError: it is no dict with these names, or the status is unknown.
        """
        if not isinstance(values, dict):
            raise UserError(f"a sample is a dict, not {values!r:.100}")
        if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(cls)}):
            raise UserError(f"a sample has no {', '.join(map(repr, unknown))}: it was written by another version")
        sample = cls(**values)
        sample.status = cls.Status(sample.status)
        return sample

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, the status as its value, arrays as lists; metadata is shared with the sample, not copied.

        JSON keeps all of it exactly if `metadata` holds only what JSON has: it refuses most other things, makes lists
        of tuples and text of keys.
        """
        lists = {name: value.tolist() for name, value in vars(self).items() if type(value) is ArrayList}
        return vars(self) | lists | {"status": self.status.value}

    def reset_for_retry(self) -> None:
        """Back to the prompt: nothing generated, no reward. `metadata` stays as it is."""
        self.tokens = self.tokens[: self.prompt_length]
        fresh = type(self)()
        for name in (*_OF_THE_RESPONSE, *(name for name in columns_of(type(self)) if name != "tokens")):
            setattr(self, name, getattr(fresh, name))

    def append_context(self, ids: Sequence[int]) -> None:
        """Add tokens behind the response that no model wrote, such as a tool's result: mask 0, log-probability 0."""
        log_probs = self.rollout_log_probs or [0.0] * self.response_length
        self.tokens = self.tokens + [*ids]
        self.loss_mask = np.append(self.mask, np.zeros(len(ids), np.int8))
        self.rollout_log_probs = log_probs + [0.0] * len(ids)
        self.response_length += len(ids)

    def trained_token_versions(self) -> list[str | None]:
        """For each response token the version of the weights that wrote it; None where `loss_mask` is 0."""
        versions: list[str | None] = [
            version
            for version, length in zip(self.weight_versions, self.weight_version_lengths, strict=True)
            for _ in range(length)
        ]
        versions += [None] * (self.response_length - len(versions))
        if self.loss_mask is None:
            return versions
        return [version if mask else None for version, mask in zip(versions, self.loss_mask, strict=True)]

    @property
    def is_finished(self) -> bool:
        """Whether generation has ended for good, in one way or another."""
        return self.status not in (self.Status.PENDING, self.Status.ABORTED)

    @property
    def is_truncated(self) -> bool:
        """Whether it was cut off at a length limit."""
        return self.status is self.Status.TRUNCATED

    @property
    def mask(self) -> np.ndarray:
        """Which response tokens are trained on, not to be changed: int8 [response_length].

        It is `loss_mask`, or ones where that is None. `remove_sample` is not looked at.
        """
        if self.loss_mask is None:
            return np.broadcast_to(np.int8(1), self.response_length)
        return self.loss_mask.array

    @property
    def trained_length(self) -> int:
        """Number of response tokens whose mask is 1: those that a model wrote, where nobody masked more."""
        return self.response_length if self.loss_mask is None else int(np.count_nonzero(self.loss_mask.array))

    @property
    def trajectory(self) -> int | None:
        """Which trajectory it is a piece of: `rollout_id`, or `index` where that is None."""
        return self.index if self.rollout_id is None else self.rollout_id

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def oldest_weight_version(self) -> int | None:
        """The lowest of `weight_versions`, of those that are numbers (Miles counts its weight syncs); None if none."""
        return min((int(version) for version in self.weight_versions if version.isdecimal()), default=None)

    def validate(self) -> None:
        """Raise ValueError if the lengths of the sample's parts contradict each other."""
        name = f"sample {self.index} of group {self.group_index}"
        if not 0 <= self.response_length <= len(self.tokens):
            raise UserError(f"{name}: response_length {self.response_length} does not fit {len(self.tokens)} tokens")
        for part, column in columns_of(type(self)).items():
            values, of_response = getattr(self, part), column.per == "response_token"
            length = self.response_length if of_response else len(self.tokens)
            if values is not None and len(values) != length:
                what = "a response" if of_response else "a sample"
                raise UserError(f"{name}: {part} has {len(values)} entries for {what} of {length} tokens")
        lengths = self.weight_version_lengths
        if lengths and (len(lengths) != len(self.weight_versions) or sum(lengths) > self.response_length):
            raise UserError(
                f"{name}: weight_version_lengths {lengths} does not fit {len(self.weight_versions)} weight_versions "
                f"and a response of {self.response_length} tokens"
            )


_OF_THE_RESPONSE = (
    "response",
    "response_length",
    "reward",
    "weight_versions",
    "weight_version_lengths",
    "remove_sample",
    "status",
)
