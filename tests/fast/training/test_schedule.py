import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.hf.flops import checkpoint_flops
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.training.batch import TrainRows
from miles.training.schedule import plan_for, plan_rollout, shard
from miles.utils.arguments import parse_args


def make_batch(total_lengths, response_lengths=None, masks=None, rollout_ids=None):
    total_lengths = np.asarray(total_lengths)
    response_lengths = total_lengths - 1 if response_lengths is None else np.asarray(response_lengths)
    rows = np.arange(len(total_lengths))
    masks = [np.ones(length) for length in response_lengths] if masks is None else masks
    columns = {
        "tokens": [np.full(length, row, np.int32) for row, length in enumerate(total_lengths)],
        "loss_masks": [np.array(mask, np.int8) for mask in masks],
        "truncated": np.zeros(len(rows), dtype=np.int64),
        "sample_indices": rows.astype(np.int64),
        "group_indices": (rows // 2).astype(np.int64),
        "rollout_ids": rows if rollout_ids is None else np.array(rollout_ids),
    }
    return TrainRows(columns, total_lengths, response_lengths)


def mask_sums(batch):
    """Unmasked response tokens of each row of a shard."""
    return [int(batch.row("loss_masks", row).sum()) for row in range(len(batch))]


def plan(batch, **options):
    defaults = {"dp_size": 1, "micro_batch_size": 1, "max_tokens": None, "per_token_loss": False}
    return plan_rollout(batch, **({"global_batch_size": len(batch)} | defaults | options))


def test_steps_take_rows_in_order():
    steps = plan(make_batch([3] * 8), global_batch_size=4, dp_size=2, micro_batch_size=2)
    assert [step.micro_batches for step in steps] == [[[[0, 2]], [[1, 3]]], [[[4, 6]], [[5, 7]]]]


def test_last_step_takes_the_rest():
    steps = plan(make_batch([3] * 7), global_batch_size=3, micro_batch_size=2)
    assert [step.micro_batches for step in steps] == [[[[0, 1], [2]]], [[[3, 4], [5]]], [[[6]]]]
    assert [step.token_weights.sum() for step in steps] == pytest.approx([1 / 2] * 3)  # two tokens a sample


def test_a_rank_with_a_row_less_has_as_many_micro_batches():
    (step,) = plan(make_batch([3] * 5), dp_size=2, micro_batch_size=2)
    assert step.micro_batches == [[[0, 2], [4]], [[1], [3]]] and step.num_micro_batches == 2


def test_a_rank_without_enough_rows_gets_masked_copies_of_the_shortest():
    batch = make_batch([5, 4, 3, 7, 6])
    steps = plan(batch, global_batch_size=4, dp_size=3)
    assert steps[0].micro_batches == [[[0], [3]], [[1]], [[2]]] and steps[0].num_micro_batches == 2
    assert steps[1].micro_batches == [[[4]], [], []] and steps[1].num_micro_batches == 1
    part = shard(batch, steps, 2)
    assert [step.micro_batches for step in part.steps] == [[[0], [1]], [[2]]]
    assert part.batch["sample_indices"].tolist() == [2, 2, 4]
    assert mask_sums(part.batch) == [2, 0, 0]
    for name in ("token_weights", "metric_weights"):
        assert part.batch[name].tolist() == np.float32([1 / 4 / 2, 0, 0]).tolist()
    assert batch.mask_sums.tolist() == [4, 3, 2, 6, 5]  # the rollout's own masks are untouched


@pytest.mark.parametrize("loss", [{}, {"per_token_loss": True}, {"constant_length": 8}])
def test_a_step_weighs_if_any_token_of_any_rank_counts(loss):
    batch = make_batch([3] * 12)
    masks = [mask.copy() for mask in batch["loss_masks"]]
    for mask in masks[4:11]:  # the second step, and three samples of the third
        mask[:] = 0
    masks[11][0] = 0  # all but the last token of the third
    batch = batch.with_columns(loss_masks=masks)
    steps = plan(batch, global_batch_size=4, dp_size=2, **loss)
    for rank in range(2):
        assert [step.weighs for step in shard(batch, steps, rank).steps] == [True, False, True]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_token_micro_batches_are_within_the_limit_and_balanced(dp_size, seed):
    lengths = np.random.default_rng(seed).integers(2, 101, size=64)
    steps = plan(make_batch(lengths), global_batch_size=32, dp_size=dp_size, max_tokens=100)
    for step in steps:
        for rank in step.micro_batches:
            assert len(rank) == step.num_micro_batches
            assert sum(len(rows) for rows in rank) == 32 // dp_size
            assert all(rows and lengths[rows].sum() <= 100 for rows in rank)
        loads = [lengths[[row for rows in rank for row in rows]].sum() for rank in step.micro_batches]
        assert max(loads) - min(loads) <= 100


@pytest.mark.parametrize("sizes", [{"micro_batch_size": 8}, {"max_tokens": 100}])
def test_at_least_so_many_micro_batches(sizes):
    batch = make_batch([3] * 8)
    (step,) = plan(batch, dp_size=2, least_micro_batches=3, **sizes)
    assert [sorted(map(len, rank)) in ([1, 1, 2], [1, 1, 1, 1]) for rank in step.micro_batches] == [True, True]
    (step,) = steps = plan(batch, dp_size=2, least_micro_batches=5, **sizes)
    assert step.num_micro_batches == 5
    assert [[len(rows) for rows in shard(batch, steps, rank).steps[0].micro_batches] for rank in (0, 1)] == [
        [1] * 5
    ] * 2


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


def test_rows_of_a_number_are_dealt_by_cost():
    costs = np.array([1, 1, 5, 6])
    (in_turn,) = plan(make_batch([2] * 4), dp_size=2, micro_batch_size=2)
    (balanced,) = plan(make_batch([2] * 4), dp_size=2, micro_batch_size=2, costs=costs)
    assert in_turn.micro_batches == [[[0, 2]], [[1, 3]]]
    assert balanced.micro_batches == [[[1, 3]], [[0, 2]]]


def test_rows_within_a_number_of_tokens_are_dealt_by_cost():
    lengths = np.array([8, 5, 5, 4, 2, 2])
    (by_tokens,) = plan(make_batch(lengths), dp_size=2, max_tokens=100)
    (by_work,) = plan(make_batch(lengths), dp_size=2, max_tokens=100, costs=lengths**2)
    assert [sorted(lengths[rows].tolist()) for rank in by_tokens.micro_batches for rows in rank] == [
        [2, 4, 8],
        [2, 5, 5],
    ]
    assert [sorted(lengths[rows].tolist()) for rank in by_work.micro_batches for rows in rank] == [[2, 2, 8], [4, 5, 5]]


def test_a_sample_must_fit():
    with pytest.raises(ValueError, match="2 of 6 samples have more than 4 tokens, the longest 7"):
        plan(make_batch([3, 3, 3, 3, 7, 6]), max_tokens=4)


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
    for step in steps:
        assert step.metric_weights.tolist() == step.token_weights.tolist()


def test_a_step_of_masked_samples_weighs_nothing():
    (step,) = plan(make_batch([3, 3], [2, 1], [[0, 0], [0]]))
    assert step.token_weights.tolist() == step.metric_weights.tolist() == [0, 0]


def test_pieces_of_a_trajectory_count_once_and_stay_together():
    masks = [[1, 1], [1], [1, 0, 1, 1], [1, 1, 1], [0, 0], [1]]
    lengths = [len(mask) for mask in masks]
    batch = make_batch(np.array(lengths) + 1, lengths, masks, rollout_ids=[7, 3, 7, 9, 3, 4])
    steps = plan(batch, global_batch_size=2)
    assert [step.rows.tolist() for step in steps] == [[0, 1, 2, 4], [3, 5]]
    # Trajectory 7 has 2 + 3 tokens, trajectory 3 has 1 + 0.
    np.testing.assert_allclose(steps[0].token_weights, [1 / 2 / 5, 1 / 2, 1 / 2 / 5, 0])
    np.testing.assert_allclose(steps[1].token_weights, [1 / 2 / 3, 1 / 2])
    by_token = plan(batch, global_batch_size=2, per_token_loss=True)
    np.testing.assert_allclose(by_token[0].token_weights, [1 / 6, 1 / 6, 1 / 6, 0])


def test_constant_length():
    masks = [[1, 1], [1], [1, 0, 1], [0]]
    lengths = [len(mask) for mask in masks]
    batch = make_batch(np.array(lengths) + 1, lengths, masks, rollout_ids=[0, 1, 0, 3])
    (step,) = plan(batch, constant_length=10)
    np.testing.assert_allclose(step.token_weights, [1 / 20, 1 / 20, 1 / 20, 0])
    np.testing.assert_allclose(step.metric_weights, [1 / 8, 1 / 2, 1 / 8, 0])


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
                weights = step.token_weights[np.searchsorted(step.rows, rows)]
                assert part.batch["token_weights"][local].tolist() == weights.tolist()
        for row, index in enumerate(part.batch["sample_indices"]):
            assert part.batch.row("tokens", row).tolist() == [index] * lengths[index]
        seen += part.batch["sample_indices"].tolist()
    assert sorted(seen) == list(range(24))


@st.composite
def rollouts(draw):
    """Trajectories of up to three pieces, in any order, and how to plan them."""
    pieces = draw(st.lists(st.integers(1, 3), min_size=1, max_size=12))
    rollout_ids = draw(st.permutations([index for index, count in enumerate(pieces) for _ in range(count)]))
    masks = [draw(st.lists(st.integers(0, 1), max_size=9)) for _ in rollout_ids]
    responses = np.array([len(mask) for mask in masks])
    lengths = responses + [draw(st.integers(1, 5)) for _ in masks]
    options = {
        "global_batch_size": draw(st.integers(1, 14)),
        "dp_size": draw(st.integers(1, 5)),
        "micro_batch_size": draw(st.integers(1, 4)),
        "max_tokens": draw(st.none() | st.integers(int(lengths.max()), 40)),
        "per_token_loss": draw(st.booleans()),
        "least_micro_batches": draw(st.integers(1, 4)),
        "costs": draw(st.sampled_from([None, lengths, lengths**2])),
    }
    return make_batch(lengths, responses, masks, rollout_ids), options


@settings(max_examples=300, deadline=None)
@given(rollouts())
def test_any_rollout_is_planned_whole(case):
    batch, options = case
    steps = plan_rollout(batch, **options)
    ids, dp_size, size = batch["rollout_ids"], options["dp_size"], options["global_batch_size"]
    parts = [shard(batch, steps, rank) for rank in range(dp_size)]

    # A step has `global_batch_size` trajectories, the last what is left, each with all of its pieces.
    trajectories = [set(ids[step.rows].tolist()) for step in steps]
    assert [len(found) for found in trajectories[:-1]] == [size] * (len(steps) - 1) and len(trajectories[-1]) <= size
    assert sum(len(found) for found in trajectories) == len(set(ids.tolist()))

    # Every sample is trained on once. What comes on top is masked and weighs nothing.
    indices = np.concatenate([part.batch["sample_indices"] for part in parts])
    real = np.concatenate([mask_sums(part.batch) == batch.mask_sums[part.batch["sample_indices"]] for part in parts])
    weights = np.concatenate([part.batch["token_weights"] for part in parts])
    assert set(indices.tolist()) == set(range(len(batch)))
    assert sorted(indices[weights > 0].tolist()) == np.flatnonzero(batch.mask_sums > 0).tolist()
    assert (weights[~real] == 0).all()

    for number, step in enumerate(steps):
        taken = [part.steps[number].micro_batches for part in parts]
        assert {len(found) for found in taken} == {step.num_micro_batches}
        assert step.num_micro_batches >= options["least_micro_batches"]
        dealt = [sum(len(rows) for rows in rank) for rank in step.micro_batches]
        assert sum(dealt) == len(step.rows) and max(dealt) - min(dealt) <= 1
        weight, trained = {}, 0.0
        for part, micro_batches in zip(parts, taken, strict=True):
            for rows in micro_batches:
                assert rows
                if options["max_tokens"] is None:
                    assert len(rows) <= options["micro_batch_size"]
                else:
                    assert part.batch.total_lengths[rows].sum() <= options["max_tokens"]
                for row in rows:
                    mine = float(part.batch["metric_weights"][row]) * mask_sums(part.batch)[row]
                    rollout = int(part.batch["rollout_ids"][row])
                    weight[rollout] = weight.get(rollout, 0.0) + mine
                    trained += mine
        # All weights together are 1, a trajectory's as much as any other's.
        unmasked = {int(rollout) for rollout in ids[step.rows][batch.mask_sums[step.rows] > 0]}
        assert trained == pytest.approx(float(bool(unmasked)), abs=1e-5)
        if not options["per_token_loss"]:
            for rollout, value in weight.items():
                assert value == pytest.approx(1 / len(unmasked) if rollout in unmasked else 0.0, abs=1e-5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tiny_checkpoint(folder)
    return folder


def test_the_configuration_is_read(checkpoint):
    prompts = checkpoint / "prompts.jsonl"
    prompts.write_text('{"input": "unused", "label": "unused"}\n')
    lengths = np.random.default_rng(0).integers(2, 1000, size=64)
    batch = make_batch(lengths)
    base = f"--device cpu --hf-checkpoint {checkpoint} --prompt-data {prompts} --label-key label --rm-type exact"
    base += " --colocate --actor-num-gpus-per-node 2 --num-rollout 1 --rollout-batch-size 8 --n-samples-per-prompt 8"
    base += " --rollout-max-response-len 70 --global-batch-size 30"
    options = dict(global_batch_size=30, dp_size=2, micro_batch_size=1, max_tokens=None, per_token_loss=False)
    dynamic = "--use-dynamic-batch-size --max-tokens-per-gpu 2000"
    work = checkpoint_flops(checkpoint).of(lengths, lengths - 1)
    for flags, changes in (
        ("--micro-batch-size 3", {"micro_batch_size": 3}),
        ("--calculate-per-token-loss", {"per_token_loss": True}),
        ("--constant-loss-length 70", {"constant_length": 70}),
        ("--balance-data", {"costs": lengths}),
        (dynamic, {"max_tokens": 2000}),
        (f"{dynamic} --balance-by-flops", {"max_tokens": 2000, "costs": work}),
    ):
        config = parse_args([*base.split(), *flags.split()])
        for mine, theirs in zip(plan_for(config, batch), plan_rollout(batch, **options | changes), strict=True):
            assert mine.micro_batches == theirs.micro_batches, flags
            assert mine.token_weights.tolist() == theirs.token_weights.tolist(), flags
