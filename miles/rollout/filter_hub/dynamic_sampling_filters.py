"""For --dynamic-sampling-filter-path: which finished groups are trained on.

A group is refused as a whole, so that what is left of a rollout are whole groups.
"""

from collections.abc import Iterable, Iterator

from miles.config import RunConfig
from miles.rollout.base_types import DynamicFilterOutput
from miles.utils.types import Sample

NestedSamples = Iterable["Sample | NestedSamples"]


def check_reward_nonzero_std(config: RunConfig, samples: NestedSamples) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: equal ones teach nothing.

    Samples without a reward, and removed ones, don't count; a group without two rewards is refused. The reason has the
    reward that all share, rounded to one decimal.
    """
    rewards = [s.reward for s in flat(samples) if s.reward is not None and not s.remove_sample]
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    if min(rewards) != max(rewards):
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1) + 0.0}")  # + 0.0: no -0.0


def check_no_aborted(config: RunConfig, samples: NestedSamples) -> DynamicFilterOutput:
    """Keep a group in which every sample came to its end."""
    ended = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    for sample in flat(samples):
        if sample.status not in ended:
            return DynamicFilterOutput(keep=False, reason=sample.status.value)
    return DynamicFilterOutput(keep=True)


def flat(samples: NestedSamples) -> Iterator[Sample]:
    """The samples of lists in lists."""
    for item in samples:
        if isinstance(item, Sample):
            yield item
        else:
            yield from flat(item)
