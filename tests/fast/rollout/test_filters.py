import pytest

from miles.rollout.filter_hub.dynamic_sampling_filters import check_no_aborted, check_reward_nonzero_std
from miles.rollout.hooks import load_hooks
from miles.utils.types import Sample


def rewarded(*rewards):
    return [Sample(reward=reward, status=Sample.Status.COMPLETED) for reward in rewards]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 1.0), None),
        ((0.1 + 0.2, 0.3), None),
        ((1.0, 1.0), "zero_std_1.0"),
        ((0.0, -0.0), "zero_std_0.0"),
        ((-0.04, -0.04), "zero_std_0.0"),
        ((None, 1.0, 1.0), "zero_std_1.0"),
        ((None, 0.0, 1.0), None),
        ((None, None), "no_reward"),
        ((0.5,), "zero_std_0.5"),
    ],
)
def test_rewards_must_differ(rewards, reason):
    decision = check_reward_nonzero_std(None, rewarded(*rewards))
    assert (decision.keep, decision.reason) == (reason is None, reason)


def test_a_removed_sample_makes_no_difference():
    samples = rewarded(1.0, 1.0, 0.0)
    samples[2].remove_sample = True
    assert not check_reward_nonzero_std(None, samples).keep


@pytest.mark.parametrize("status", ["aborted", "failed", "pending"])
def test_all_must_have_ended(status):
    samples = rewarded(1.0, 0.0)
    samples[0].status = Sample.Status.TRUNCATED
    assert check_no_aborted(None, samples).keep
    samples[1].status = Sample.Status(status)
    decision = check_no_aborted(None, samples)
    assert not decision.keep and decision.reason == status


def test_lists_in_lists_are_looked_into():
    """What one prompt fans out to may be nested: an aborted sample deep inside counts."""
    nested = [rewarded(1.0), [rewarded(0.0), rewarded(1.0)[0]]]
    assert check_no_aborted(None, nested).keep and check_reward_nonzero_std(None, nested).keep
    nested[1][0][0].status = Sample.Status.ABORTED
    assert not check_no_aborted(None, nested).keep


@pytest.mark.parametrize("name", ["check_no_aborted", "check_reward_nonzero_std"])
def test_they_are_given_by_path(engine_config, name):
    path = f"miles.rollout.filter_hub.dynamic_sampling_filters.{name}"
    hooks = load_hooks(engine_config.model_copy(update={"dynamic_sampling_filter_path": path}))
    assert hooks.dynamic_filter.__name__ == name
