"""Groups that wait between rollouts: finished ones to train on, and others to go on with."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from miles.config import RunConfig
from miles.utils.errors import UserError
from miles.utils.types import Sample

Group = list[Sample]
# In the metadata of the first piece: the sample that a generate function was given, to ask it again. Where there is one
# piece with its prompt, that says it all.
ASKED = "asked_sample"


def index_of(group: Group) -> int:
    """The group_index of a group, which each that a rollout takes has."""
    index = group[0].group_index
    assert index is not None
    return index


def trajectories(group: Iterable[Sample]) -> list[list[Sample]]:
    """The pieces of each trajectory of a group; they stand side by side."""
    return [list(pieces) for _, pieces in groupby(group, key=lambda sample: sample.trajectory)]


def as_asked(pieces: list[Sample]) -> Sample:
    """The prompt of a trajectory, to be asked again: pending, without a response. The first piece is reused."""
    asked = pieces[0].metadata.get(ASKED)
    sample = pieces[0] if asked is None else Sample.from_dict(asked)
    sample.reset_for_retry()
    return sample


def is_stale(group: Group, version: int | None, limit: int | None) -> bool:
    """Whether a token is of weights more than `limit` versions older than `version`; never where either is None."""
    if version is None or limit is None:
        return False
    versions = (sample.oldest_weight_version for sample in group)
    return any(oldest is not None and version - oldest > limit for oldest in versions)


def oldest_first(
    config: RunConfig, rollout_id: int, buffer: list[Group], num_groups: int
) -> tuple[list[Group], list[Group]]:
    """Take at most `num_groups` groups out of `buffer`, in place; returns them, and those thrown away: none."""
    oldest = buffer[:num_groups]
    del buffer[:num_groups]
    return oldest, []


class SampleBuffer:
    """The groups between rollouts, the oldest first.

    Attributes:
        finished: rewarded, and kept by the filter.
        unfinished: to go on with; some of their samples are aborted or pending.
    """

    def __init__(self) -> None:
        self.finished: deque[Group] = deque()
        self.unfinished: list[Group] = []

    def __len__(self) -> int:
        return len(self.finished) + len(self.unfinished)

    def __iter__(self) -> Iterator[Group]:
        yield from self.finished
        yield from self.unfinished

    def ask_again(self, group: Group) -> None:
        """Put a group among the unfinished ones without any response."""
        self.unfinished.append([as_asked(pieces) for pieces in trajectories(group)])

    def state_dict(self, kept: Iterable[Group], running: Iterable[Group]) -> dict[str, Any]:
        """For JSON: the groups here, and those that were taken out: finished ones, and others that are worked on."""
        return {
            "finished": [[_saved(sample) for sample in group] for group in (*kept, *self.finished)],
            "unfinished": [[_saved(sample) for sample in group] for group in (*running, *self.unfinished)],
        }

    def load_state_dict(self, state: dict[str, Any], samples_per_prompt: int) -> None:
        """Take over the groups of a saved state, in place of those here.

        Raises: ValueError if their size isn't `samples_per_prompt`.
        """
        read = {
            name: [[Sample.from_dict(fields) for fields in group] for group in state[name]]
            for name in ("finished", "unfinished")
        }
        sizes = {len(trajectories(group)) for groups in read.values() for group in groups}
        if sizes - {samples_per_prompt}:
            raise UserError(
                f"the checkpoint has groups of {', '.join(map(str, sorted(sizes)))} samples that wait for training, "
                f"and --n-samples-per-prompt is {samples_per_prompt}; give what was given then, or start without "
                "loading"
            )
        self.finished, self.unfinished = deque(read["finished"]), read["unfinished"]


def _saved(sample: Sample) -> dict[str, Any]:
    """A copy that later changes of the sample don't show in."""
    values = sample.to_dict()
    nested = {name: copy.deepcopy(values[name]) for name in ("prompt", "metadata")}
    # Copying deeply what is long and flat would take seconds.
    return {name: value.copy() if isinstance(value, list) else value for name, value in values.items()} | nested
