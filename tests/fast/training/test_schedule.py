import time

import numpy as np
import pytest

from miles.training.batch import TrainBatch, offsets_of
from miles.training.schedule import plan_rollout, shard


def make_batch(total_lengths, response_lengths=None, masks=None):
    total_lengths = np.asarray(total_lengths)
    response_lengths = total_lengths - 1 if response_lengths is None else np.asarray(response_lengths)
    rows = np.arange(len(total_lengths))
    masks = np.ones(response_lengths.sum()) if masks is None else np.concatenate(masks)
    columns = {
        "tokens": np.repeat(rows, total_lengths).astype(np.int64),
        "loss_masks": masks.astype(np.int32),
        "truncated": np.zeros(len(rows), dtype=np.int64),
        "sample_indices": rows.astype(np.int64),
        "group_indices": (rows // 2).astype(np.int64),
    }
    return TrainBatch(columns, offsets_of(total_lengths), offsets_of(response_lengths))


def plan(batch, **options):
    defaults = {"dp_size": 1, "micro_batch_size": 1, "max_tokens": None, "per_token_loss": False}
    return plan_rollout(batch, **({"global_batch_size": len(batch)} | defaults | options))


def test_steps_take_rows_in_order():
    steps = plan(make_batch([3] * 8), global_batch_size=4, dp_size=2, micro_batch_size=2)
    assert [step.micro_batches for step in steps] == [[[[0, 2]], [[1, 3]]], [[[4, 6]], [[5, 7]]]]


def test_last_fixed_micro_batch_may_be_smaller():
    (step,) = plan(make_batch([3] * 5), micro_batch_size=2)
    assert step.micro_batches == [[[0, 1], [2, 3], [4]]]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_token_micro_batches_are_within_the_limit_and_equally_many(dp_size, seed):
    lengths = np.random.default_rng(seed).integers(2, 101, size=64)
    steps = plan(make_batch(lengths), global_batch_size=32, dp_size=dp_size, max_tokens=100)
    for step in steps:
        for rank in step.micro_batches:
            assert len(rank) == len(step.micro_batches[0])
            assert sum(len(rows) for rows in rank) == 32 // dp_size
            assert all(rows and lengths[rows].sum() <= 100 for rows in rank)
        loads = [lengths[[row for rows in rank for row in rows]].sum() for rank in step.micro_batches]
        assert max(loads) - min(loads) <= 100


@pytest.mark.parametrize("sizes", [{"micro_batch_size": 8}, {"max_tokens": 100}])
def test_at_least_so_many_micro_batches(sizes):
    (step,) = plan(make_batch([3] * 8), dp_size=2, least_micro_batches=3, **sizes)
    assert [sorted(map(len, rank)) in ([1, 1, 2], [1, 1, 1, 1]) for rank in step.micro_batches] == [True, True]
    with pytest.raises(ValueError, match="can't be cut into 5 micro-batches a rank; choose at least 10"):
        plan(make_batch([3] * 8), dp_size=2, least_micro_batches=5, **sizes)


def test_first_fit_decreasing():
    (step,) = plan(make_batch([4, 8, 2, 6]), max_tokens=10)
    assert step.micro_batches == [[[1, 2], [0, 3]]]


def test_a_rank_with_fewer_micro_batches_splits_its_fullest():
    # Rank 0 gets 9 + 1 tokens, which one micro-batch could hold, but rank 1 needs two for 6 + 6.
    (step,) = plan(make_batch([9, 6, 6, 1]), dp_size=2, max_tokens=10)
    assert [sorted(rank) for rank in step.micro_batches] == [[[0], [3]], [[1], [2]]]


def test_as_many_micro_batches_as_rows():
    (step,) = plan(make_batch([9, 9, 3, 3]), dp_size=2, max_tokens=10)
    assert [len(rank) for rank in step.micro_batches] == [2, 2]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"global_batch_size": 4}, "6 samples.*steps of 4.*2 would be left"),
        ({"dp_size": 4}, "6 samples.*4 data-parallel"),
        ({"max_tokens": 4}, "2 of 6 samples have more than 4 tokens, the longest 7"),
    ],
)
def test_refuses_sizes_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        plan(make_batch([3, 3, 3, 3, 7, 6]), **options)


@pytest.mark.parametrize("max_tokens", [None, 12])
@pytest.mark.parametrize("per_token_loss", [False, True])
def test_weights_of_a_step_add_up_to_one(per_token_loss, max_tokens):
    masks = [[1, 0, 1], [1, 1, 1, 1, 1], [0, 0], [1], [1, 0], [0], [0, 0, 0], [0]]
    response_lengths = [len(mask) for mask in masks]
    batch = make_batch(np.array(response_lengths) + 2, response_lengths, masks)
    steps = plan(batch, global_batch_size=4, dp_size=2, max_tokens=max_tokens, per_token_loss=per_token_loss)
    expected = [1 / 8, 1 / 8, 0, 1 / 8] if per_token_loss else [1 / 6, 1 / 15, 0, 1 / 3]
    np.testing.assert_allclose(steps[0].token_weights, expected, rtol=1e-6)
    np.testing.assert_allclose(steps[1].token_weights, [1, 0, 0, 0])


def test_a_step_of_masked_samples_weighs_nothing():
    (step,) = plan(make_batch([3, 3], [2, 1], [[0, 0], [0]]))
    assert step.token_weights.tolist() == [0, 0]


@pytest.mark.parametrize("max_tokens", [None, 20])
def test_shards_hold_every_sample_once(max_tokens):
    lengths = np.random.default_rng(0).integers(2, 21, size=24)
    batch = make_batch(lengths)
    steps = plan(batch, global_batch_size=12, dp_size=3, micro_batch_size=3, max_tokens=max_tokens)
    seen = []
    for rank in range(3):
        part = shard(batch, steps, rank)
        local_rows = [row for step in part.steps for rows in step.micro_batches for row in rows]
        assert local_rows == list(range(8))
        for step, local_step in zip(steps, part.steps, strict=True):
            for rows, local in zip(step.micro_batches[rank], local_step.micro_batches, strict=True):
                assert part.batch["sample_indices"][local].tolist() == rows
                weights = step.token_weights[np.array(rows) - step.start]
                assert part.batch["token_weights"][local].tolist() == weights.tolist()
        for row, index in enumerate(part.batch["sample_indices"]):
            assert part.batch.row("tokens", row).tolist() == [index] * lengths[index]
        seen += part.batch["sample_indices"].tolist()
    assert sorted(seen) == list(range(24))


def test_a_large_rollout_plans_fast():
    rng = np.random.default_rng(0)
    batch = make_batch(rng.integers(2, 64, size=200_000))
    start = time.perf_counter()
    plan(batch, global_batch_size=2000, dp_size=8, max_tokens=512)
    assert time.perf_counter() - start < 10
