import math

import pytest

from miles.rollout.metrics import eval_metrics, rollout_metrics
from miles.tracking.metrics import describe
from miles.utils.types import Sample


def sample(index, reward, group=0, rollout=None, mask=None, teacher=None, **more):
    length = 2 if mask is None else len(mask)
    return Sample(
        index=index,
        group_index=group,
        rollout_id=rollout,
        tokens=[1] * (length + 1),
        response_length=length,
        reward=reward,
        loss_mask=mask,
        rollout_log_probs=[-1.0] * length,
        teacher_log_probs=teacher,
        status=Sample.Status.COMPLETED,
        **more,
    )


def test_a_rollout_in_pieces_counts_once():
    # Group 0: rollout 0 in three pieces with reward 1, rollout 3 with reward 0. Group 1: two pieces of rollout 4 and
    # one of rollout 6, all of reward 1. Group 2: a rollout alone.
    pieces = [sample(0, 1.0, rollout=0), sample(1, 1.0, rollout=0), sample(2, 1.0, rollout=0), sample(3, 0.0)]
    pieces += [sample(4, 1.0, group=1, rollout=4), sample(5, 1.0, group=1, rollout=4), sample(6, 1.0, group=1)]
    metrics = rollout_metrics([*pieces, sample(7, 1.0, group=2)], [0.5, 0.5, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0])
    assert metrics["rollout/raw_reward"] == pytest.approx(4 / 5)
    assert metrics["rollout/rewards"] == 0
    assert metrics["rollout/zero_std/count_1.0"] == 1 and metrics["rollout/zero_std/all_one_percentage"] == 50
    abstained = [sample(0, None, rollout=0), sample(1, None, rollout=0), sample(2, 1.0)]
    assert rollout_metrics(abstained, [0.0] * 3)["rollout/none_reward_ratio"] == 0.5


def test_abstentions_are_no_members_of_their_group():
    rewards = {0: [1.0, None, None, None], 1: [0.1 + 0.2, 0.3, 0.3, None], 2: [1.0, 0.0, None, 1.0]}
    samples = [sample(4 * group + i, r, group) for group, of in rewards.items() for i, r in enumerate(of)]
    metrics = rollout_metrics(samples, [0.0] * len(samples))
    assert {name: value for name, value in metrics.items() if "zero_std" in name} == {
        "rollout/zero_std/count_0.3": 1,
        "rollout/zero_std/all_zero_percentage": 0,
        "rollout/zero_std/all_one_percentage": 0,
    }


def test_a_removed_piece_does_not_hide_its_rollout():
    pieces = [sample(0, 1.0, rollout=0, remove_sample=True), sample(1, 1.0, rollout=0), sample(2, 0.0)]
    metrics = rollout_metrics(pieces, [0.0, 0.5, -0.5])
    assert metrics["rollout/raw_reward"] == 0.5 and metrics["rollout/rewards"] == 0
    assert metrics["rollout/removed_ratio"] == pytest.approx(1 / 3)


def test_teacher_metrics_are_of_trained_tokens():
    samples = [
        sample(0, 0.0, mask=[1, 0, 1], teacher=[-2.0, math.nan, -4.0]),
        sample(1, 0.0, teacher=[-1.5, -1.5]),
        sample(2, 0.0, teacher=[-90.0, -90.0], remove_sample=True),
    ]
    metrics = rollout_metrics(samples, None)
    assert metrics["rollout/teacher_log_probs"] == pytest.approx(-9 / 4)
    assert not [name for name in metrics if "reward" in name or "zero_std" in name]
    masked = rollout_metrics([sample(0, 0.0, mask=[0, 0], teacher=[-1.0, -1.0])], None)
    assert "rollout/teacher_log_probs" not in masked
    assert "rollout/teacher_log_probs" not in rollout_metrics([sample(0, 0.0)], None)


def test_raw_rewards_of_a_post_process_take_the_place_of_the_samples_own():
    samples = [sample(0, 1.0), sample(1, 0.0)]
    metrics = rollout_metrics(samples, [0.5, -0.5], [4.0, None])
    assert metrics["rollout/raw_reward"] == 4 and metrics["rollout/none_reward_ratio"] == 0


def test_evaluation_by_hand():
    samples = [
        sample(0, 1.0, mask=[1, 0, 1]),
        sample(1, None),
        sample(2, 0.0, group=1),
        sample(3, None, group=1, mask=[], remove_sample=True),
    ]
    samples[2].status, samples[3].status = Sample.Status.TRUNCATED, Sample.Status.FAILED
    assert eval_metrics("a", samples) == {
        "eval/a": 0.5,
        "eval/a-none_reward_ratio": 0.5,
        "eval/a-truncated_ratio": 0.25,
        "eval/a-failed_ratio": 0.25,
        "eval/a/response_len/mean": 1.5,
        "eval/a/response_len/median": 2,
        "eval/a/response_len/max": 2,
        "eval/a/response_len/min": 0,
    }
    passed = eval_metrics("a", samples, pass_rates=True)
    assert {name: value for name, value in passed.items() if "@" in name} == {"eval/a-pass@1": 0.5}
    assert math.isnan(eval_metrics("a", samples[1:2])["eval/a"])
    with pytest.raises(ValueError, match="evaluation 'a' has no samples"):
        eval_metrics("a", [])


def test_a_trajectory_of_an_evaluation_counts_once():
    pieces = [sample(0, None, rollout=0), sample(0, 1.0, rollout=0), sample(0, 1.0, rollout=0), sample(1, 0.0)]
    metrics = eval_metrics("a", pieces, pass_rates=True)
    assert metrics["eval/a"] == metrics["eval/a-pass@1"] == 0.5 and metrics["eval/a-pass@2"] == 1
    assert metrics["eval/a-none_reward_ratio"] == 0


def test_samples_without_numbers_are_groups_of_their_own():
    samples = [sample(None, 1.0, group=None), sample(None, 0.0, group=None)]
    passed = eval_metrics("a", samples, pass_rates=True)
    assert passed["eval/a-pass@1"] == passed["eval/a"] == 0.5 and "eval/a-pass@2" not in passed


def test_every_metric_of_an_evaluation_is_registered():
    metrics = eval_metrics("a-b", [sample(0, 1.0), sample(1, 0.0)], pass_rates=True)
    assert "chance" in describe("eval/a-b-pass@2") and all(map(describe, metrics))
