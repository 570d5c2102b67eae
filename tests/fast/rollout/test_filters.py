import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.filter_hub.dynamic_sampling_filters import advice, check_no_aborted, check_reward_nonzero_std
from miles.rollout.hooks import load_hooks
from miles.rollout.metrics import _zero_std
from miles.utils.types import Sample


def rewarded(*rewards):
    return [Sample(reward=reward, status=Sample.Status.COMPLETED) for reward in rewards]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 1.0), None),
        ((0.1 + 0.2, 0.3, 0.3, 0.3), "zero_std_0.3"),
        ((0.1 + 0.2 - 0.3, 0.0), "zero_std_0.0"),
        ((1e6, 1e6 + 0.1), "zero_std_1000000.1"),
        ((1e6, 1e6 + 10), None),
        ((1.0, 1.0 - 1e-5), None),
        ((1e-5, 2e-5), None),
        ((1.0, 1.0), "zero_std_1.0"),
        ((0.0, -0.0), "zero_std_0.0"),
        ((-0.04, -0.04), "zero_std_0.0"),
        ((None, 1.0, 1.0), "zero_std_1.0"),
        ((None, 0.0, 1.0), None),
        ((None, None), "no_reward"),
        ((), "no_reward"),
        ((1.0, None), "one_reward"),
        ((0.5,), "one_reward"),
    ],
)
def test_rewards_must_differ(rewards, reason):
    decision = check_reward_nonzero_std(None, rewarded(*rewards))
    assert (decision.keep, decision.reason) == (reason is None, reason)


# Near each other and near where reasons are rounded: whether two are the same, and as what, must not depend on order.
VALUES = st.one_of(st.none(), st.sampled_from([0.0, -0.0, 0.1 + 0.2, 0.3, 0.25, math.nextafter(0.25, 1), 1.0]))


@settings(deadline=None)
@given(st.data(), st.lists(VALUES, max_size=6))
def test_the_order_of_a_group_decides_nothing(data, rewards):
    shuffled = data.draw(st.permutations(rewards))
    assert check_reward_nonzero_std(None, rewarded(*rewards)) == check_reward_nonzero_std(None, rewarded(*shuffled))
    metrics = [_zero_std(order, [0] * len(order)) for order in (rewards, shuffled)]
    assert metrics[0] == metrics[1]
    decision = check_reward_nonzero_std(None, rewarded(*rewards))
    counted = {name for name in metrics[0] if "count_" in name}
    same = (decision.reason or "").startswith("zero_std_")
    assert counted == ({f"rollout/zero_std/count_{decision.reason[9:]}"} if same else set()), "both say the same"


@pytest.mark.parametrize("rewards", [(1.0, math.nan), (math.nan, 1.0), (math.inf, math.inf), (-math.inf, 0.0)])
def test_a_reward_that_is_no_number_is_an_error(rewards):
    with pytest.raises(ValueError, match="must be a finite number"):
        check_reward_nonzero_std(None, rewarded(*rewards))


def test_advice_is_about_the_reasons_there_were():
    prompts, reward, ends = advice(["zero_std_1.0", "one_reward", "failed", "mine"])
    assert "too easy" in prompts and "abstains" in reward and ends.endswith("end as failed")
    assert advice(["no_reward"]) == [reward] and advice(["mine"]) == []


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
    hooks = load_hooks(engine_config.model_copy(update={"dynamic_sampling_filter_path": path}), None)
    assert hooks.keep_group.args[1].__name__ == name
