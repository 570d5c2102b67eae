"""What functions of the user's own return; docs/user-guide/customisation.md has an example of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miles.utils.types import Sample


@dataclass(frozen=True)
class RolloutFnTrainOutput:
    """A rollout.

    Args:
        samples: groups of finished samples that share `group_index`, with rewards.
        metrics: numbers by the name under which they are reported.
    """

    samples: Sequence[Sequence[Sample]]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutFnEvalOutput:
    """An evaluation.

    Args:
        data: the finished samples of each set by its name, with rewards.
        metrics: numbers by the name under which they are reported, besides Miles' own.
    """

    data: Mapping[str, Sequence[Sample]]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DynamicFilterOutput:
    """Whether a finished group is trained on.

    Args:
        keep: False: another prompt takes its place.
        reason: why not, a word or two that the refused groups are counted by.
    """

    keep: bool
    reason: str | None = None
