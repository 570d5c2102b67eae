"""For --dynamic-sampling-filter-path: which finished groups are trained on.

A group is refused as a whole, so that what is left of a rollout are whole groups.
"""

from collections.abc import Iterable, Iterator

from miles.config import RunConfig
from miles.rollout.base_types import DynamicFilterOutput
from miles.rollout.equal_rewards import all_same, rounded
from miles.utils.types import Sample

NestedSamples = Iterable["Sample | NestedSamples"]

# Reasons of check_reward_nonzero_std; the last is followed by the reward.
NO_REWARD, ONE_REWARD, SAME_REWARD = "no_reward", "one_reward", "zero_std_"


def keep_every_group(config: RunConfig, samples: NestedSamples) -> DynamicFilterOutput:
    """Miles' own where no filter is given."""
    return DynamicFilterOutput(keep=True)


def check_reward_nonzero_std(config: RunConfig, samples: NestedSamples) -> DynamicFilterOutput:
    """Keep a group whose rewards differ by more than rounding (`all_same`): equal ones teach nothing.

    Samples without a reward, and removed ones, are no members. The reason is no_reward where none is left, one_reward
    where a single one is, which has nothing to be compared with, and else the reward that all share, rounded to one
    decimal.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards = [s.reward for s in flat(samples) if s.reward is not None and not s.remove_sample]
    if not all_same(rewards):
        return DynamicFilterOutput(keep=bool(rewards), reason=None if rewards else NO_REWARD)
    if len(rewards) == 1:
        return DynamicFilterOutput(keep=False, reason=ONE_REWARD)
    return DynamicFilterOutput(keep=False, reason=f"{SAME_REWARD}{rounded(max(rewards))}")


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


def advice(reasons: Iterable[str]) -> list[str]:
    """What to give where too few groups pass, by the reasons for which others were refused."""
    reasons, ways = set(reasons), []
    if any(reason.startswith(SAME_REWARD) for reason in reasons):
        ways.append("prompts that are neither too easy nor too hard for the model, or more --n-samples-per-prompt")
    if reasons & {NO_REWARD, ONE_REWARD}:
        ways.append("a reward that abstains (None) or fails less often: a group needs two to compare")
    if unfinished := sorted(reasons & {status.value for status in Sample.Status}):
        ways.append(f"a way to generate with fewer samples that end as {', '.join(unfinished)}")
    return ways
