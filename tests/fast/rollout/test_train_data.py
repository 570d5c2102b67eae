"""--custom-convert-samples-to-train-data-path: lists of the user's own become a checked training batch."""

import numpy as np
import pytest
import torch

from miles.rollout.train_data import batch_from, train_data
from miles.training.batch import TrainRows
from miles.utils.errors import UserError
from miles.utils.types import Sample
from tests.fast.rollout.finished_samples import four_samples

FLAG = "--custom-convert-samples-to-train-data-path"


def equal_rows(a: TrainRows, b: TrainRows) -> bool:
    a, b = (rows.select(range(len(rows))) for rows in (a, b))
    return set(a.columns) == set(b.columns) and all(
        np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f") for name in a.columns
    )


def test_the_data_that_miles_makes_becomes_the_batch_that_miles_makes():
    samples = four_samples()
    samples[0].remove_sample = True
    samples[1].reward = None
    samples[2].status = Sample.Status.TRUNCATED
    samples[3].loss_mask = None
    samples[3].rollout_id = 30
    for sample in samples:
        sample.teacher_log_probs = [-1.0, -2.0]
    rewards = [0.5, -0.5, 0.25, -0.25]
    ours = TrainRows.from_samples(samples, rewards)
    assert ours.mask_sums.tolist() == [0, 0, 2, 2]
    assert equal_rows(batch_from(FLAG, train_data(samples, rewards), samples, rewarded=True), ours)
    supervised = batch_from(FLAG, train_data(samples, None), samples, rewarded=False)
    assert equal_rows(supervised, TrainRows.from_samples(samples, None))


def test_what_follows_from_the_rest_may_be_left_out():
    samples = four_samples()
    data = train_data(samples, [1.0, 2.0, 3.0, 4.0])
    for name in ("raw_reward", "truncated", "rollout_ids", "group_indices"):
        del data[name]
    data["rewards"] = np.float32(data["rewards"])
    data["tokens"] = [torch.tensor(row) for row in data["tokens"]]
    data["loss_masks"] = [tuple(row) for row in data["loss_masks"]]
    batch = batch_from(FLAG, data, samples, rewarded=True)
    assert batch["raw_reward"].tolist() == batch["rewards"].tolist() == [1, 2, 3, 4]
    assert batch["rollout_ids"].tolist() == [0, 1, 2, 3] and batch["group_indices"].tolist() == [0, 0, 1, 1]
    assert batch["truncated"].tolist() == [0] * 4


def with_entry(name, value, place=None):
    def change(data):
        if place is None:
            data[name] = value
        else:
            data[name][place] = value

    return change


def without(name):
    def change(data):
        del data[name]

    return change


def an_unknown_sample(data):
    del data["group_indices"]
    data["sample_indices"][2] = 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("tokens"),
            "returned no tokens; it must return tokens, response_lengths, loss_masks, sample_indices, ",
        ),
        (without("rewards"), "returned no rewards"),
        (without("rollout_log_probs"), "returned no rollout_log_probs"),
        (with_entry("reward", [1.0] * 4), "returned 'reward'; it may return tokens, response_lengths"),
        (with_entry("rewards", [1.0] * 3), "must return lists of one entry a sample; it returned 4 tokens, "),
        (with_entry("rewards", 1.0), "1.0 (float) rewards"),
        (an_unknown_sample, "returned sample_indices 9, which no sample has, and no group_indices"),
        (
            with_entry("rollout_ids", 0, 1),
            "returned 3 rollout_ids for 4 trajectories, 1 of which are missing and 0 unk",
        ),
        (with_entry("rollout_ids", [0, 1, 2, 7]), "4 trajectories, 1 of which are missing and 1 unknown"),
        (with_entry("tokens", [1.5, 2.0], 1), "returned tokens[1] = [1.5, 2.0] (list); it must be a list of integers"),
        (with_entry("response_lengths", "2", 0), "returned response_lengths[0] = '2' (str); it must be an integer"),
        (with_entry("loss_masks", [1], 3), "sample 3 of group 1: loss_mask has 1 entries for a response of 2 tokens"),
        (with_entry("loss_masks", [1, 2], 3), "loss_mask holds [1, 2]; only 0 and 1 are allowed"),
        (with_entry("rewards", float("inf"), 0), "1 of 4 rewards aren't finite numbers"),
        (
            with_entry("rollout_log_probs", None, 0),
            "returned rollout_log_probs[0] = None (NoneType); it must be a list",
        ),
        (with_entry("raw_reward", "a", 0), "returned raw_reward[0] = 'a' (str); it must be a number or None"),
        (with_entry("group_indices", None, 0), "returned group_indices[0] = None (NoneType); it must be an integer"),
    ],
)
def test_refused(change, message):
    samples = four_samples()
    data = train_data(samples, [1.0] * 4)
    change(data)
    with pytest.raises(ValueError) as caught:
        batch_from(FLAG, data, samples, rewarded=True)
    assert str(caught.value).startswith(FLAG) and message in str(caught.value)


def test_only_a_dict():
    with pytest.raises(ValueError, match="returned None \\(NoneType\\); it must return a dict of lists"):
        batch_from(FLAG, None, four_samples(), rewarded=True)


def test_a_fault_of_the_program_is_not_laid_on_the_function(monkeypatch):
    def broken(lists):
        raise ValueError("zip() argument 2 is shorter than argument 1")

    samples = four_samples()
    monkeypatch.setattr(TrainRows, "from_lists", broken)
    with pytest.raises(ValueError, match="^zip") as caught:
        batch_from(FLAG, train_data(samples, [1.0] * 4), samples, rewarded=True)
    assert not isinstance(caught.value, UserError)
