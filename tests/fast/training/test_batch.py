import pickle

import numpy as np
import pytest

from miles.training.batch import TrainRows
from miles.utils.types import Sample


def sample(index, prompt, response, **fields):
    fields = {"status": Sample.Status.COMPLETED, "reward": 1.0, "group_index": index // 2} | fields
    return Sample(index=index, tokens=prompt + response, response_length=len(response), **fields)


def whole(samples, rewards):
    """All of the rows end to end."""
    return TrainRows.from_samples(samples, rewards).select(range(len(samples)))


@pytest.fixture
def samples():
    return [
        sample(0, [1, 2], [3, 4, 5], rollout_log_probs=[-0.1, -0.2, -0.3], loss_mask=[1, 0, 1]),
        sample(1, [6], [7], rollout_log_probs=[-0.4], reward=0.0, status=Sample.Status.TRUNCATED),
        sample(2, [8, 9], [10, 11], rollout_log_probs=[-0.5, -0.6], reward=None),
        sample(3, [12], [13, 14], rollout_log_probs=[-0.7, -0.8], remove_sample=True),
    ]


def test_columns_hold_what_the_samples_hold(samples):
    batch = whole(samples, [0.5, -0.5, 0.0, 0.0])
    assert len(batch) == 4
    assert batch["tokens"].tolist() == list(range(1, 15))
    assert batch.total_lengths.tolist() == [5, 2, 4, 3]
    assert batch.response_lengths.tolist() == [3, 1, 2, 2]
    assert batch["rewards"].tolist() == [0.5, -0.5, 0.0, 0.0]
    assert batch["truncated"].tolist() == [0, 1, 0, 0]
    assert batch["group_indices"].tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(batch["raw_reward"], np.float32([1, 0, np.nan, 1]))
    np.testing.assert_allclose(batch.row("rollout_log_probs", 2), [-0.5, -0.6])
    assert batch["rollout_ids"].tolist() == [0, 1, 2, 3] and "teacher_log_probs" not in batch


def test_teacher_and_trajectories(samples):
    for one in samples:
        one.teacher_log_probs = [-1.0 - one.index] * one.response_length
    samples[3].rollout_id = samples[2].index
    batch = whole(samples, None)
    assert batch["rollout_ids"].tolist() == [0, 1, 2, 2]
    assert batch.row("teacher_log_probs", 2).tolist() == [-3.0, -3.0]


def test_sums_of_masks_where_responses_are_empty():
    masks = [[], [1, 0, 1], [], [], [1], []]
    samples = [sample(index, [1], [2] * len(mask), loss_mask=mask) for index, mask in enumerate(masks)]
    rows = TrainRows.from_samples(samples, None)
    assert rows.mask_sums.tolist() == [0, 2, 0, 0, 1, 0]
    assert len(rows.select([0, 2])["loss_masks"]) == 0
    assert rows.mask_sums.dtype == np.int64


def test_abstained_and_removed_samples_are_masked(samples):
    rows = TrainRows.from_samples(samples, [0.5, -0.5, 0.0, 0.0])
    assert [mask.tolist() for mask in rows["loss_masks"]] == [[1, 0, 1], [1], [0, 0], [0, 0]]
    assert rows.mask_sums.tolist() == [2, 1, 0, 0]


def test_supervised_samples_need_no_reward(samples):
    for one in samples:
        one.reward, one.rollout_log_probs = None, None
    rows = TrainRows.from_samples(samples, None)
    assert rows.mask_sums.tolist() == [2, 1, 2, 0]
    assert "rewards" not in rows and "rollout_log_probs" not in rows


def test_select_and_pickle_keep_rows_whole(samples):
    rows = TrainRows.from_samples(samples, [0.5, -0.5, 0.0, 0.25])
    picked = pickle.loads(pickle.dumps(rows.select([3, 0])))
    assert picked["tokens"].tolist() == [12, 13, 14, 1, 2, 3, 4, 5]
    assert picked["loss_masks"].tolist() == [0, 0, 1, 0, 1]
    assert picked["rewards"].tolist() == [0.25, 0.5]
    assert picked.row("tokens", 1).tolist() == [1, 2, 3, 4, 5]
    assert len(rows.select([])) == 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rollout_log_probs": None}, "3 of 4 samples have rollout_log_probs"),
        ({"rollout_log_probs": [0.0]}, "sample 0 of group 0.*rollout_log_probs"),
        ({"teacher_log_probs": [0.0] * 3}, "1 of 4 samples have teacher_log_probs: all or none must"),
        ({"teacher_log_probs": [0.0]}, "sample 0 of group 0.*teacher_log_probs"),
        ({"rollout_id": 2}, r"rollout_id 2 is shared by samples of the groups \[0, 1\]"),
        ({"loss_mask": [1, 1]}, "sample 0 of group 0.*loss_mask"),
        ({"loss_mask": [1, 2, 1]}, "only 0 and 1"),
        ({"response_length": 5, "loss_mask": None, "rollout_log_probs": [0.0] * 5}, "prompt has no tokens"),
        ({"status": Sample.Status.PENDING}, "pending"),
        ({"group_index": None}, "group_index"),
    ],
)
def test_refuses_a_broken_sample(samples, change, words):
    for name, value in change.items():
        setattr(samples[0], name, value)
    with pytest.raises(ValueError, match=words):
        TrainRows.from_samples(samples, [0.0] * 4)


def test_refuses_wrong_rewards(samples):
    with pytest.raises(ValueError, match="3 rewards for 4 samples"):
        TrainRows.from_samples(samples, [0.0] * 3)
    with pytest.raises(ValueError, match="1 of 4 rewards"):
        TrainRows.from_samples(samples, [0.0, np.nan, 0.0, 0.0])
    with pytest.raises(ValueError, match="at least one sample"):
        TrainRows.from_samples([], [])
