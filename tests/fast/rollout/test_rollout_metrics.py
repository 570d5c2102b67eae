import math

import pytest

from miles.rollout.metrics import rollout_metrics
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
    # Group 0: rollout 0 in three pieces with reward 1, rollout 3 with reward 0. Group 1: two pieces, both of reward 1.
    pieces = [sample(0, 1.0, rollout=0), sample(1, 1.0, rollout=0), sample(2, 1.0, rollout=0), sample(3, 0.0)]
    pieces += [sample(4, 1.0, group=1, rollout=4), sample(5, 1.0, group=1, rollout=4)]
    metrics = rollout_metrics(pieces, [0.5, 0.5, 0.5, -0.5, 0.0, 0.0])
    assert metrics["rollout/raw_reward"] == pytest.approx(2 / 3)
    assert metrics["rollout/rewards"] == 0
    assert metrics["rollout/zero_std/count_1.0"] == 1 and metrics["rollout/zero_std/all_one_percentage"] == 50
    abstained = [sample(0, None, rollout=0), sample(1, None, rollout=0), sample(2, 1.0)]
    assert rollout_metrics(abstained, [0.0] * 3)["rollout/none_reward_ratio"] == 0.5


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
