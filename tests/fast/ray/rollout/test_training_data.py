"""From finished groups to shards and metrics; hooks are seen in tests/fast/rollout/test_user_functions.py."""

import itertools

import pytest

from miles.ray.rollout.training_data import check_complete, training_data
from miles.rewards.compute import RewardCounts, check_errors
from miles.rollout.hooks import Hooks
from miles.rollout.user_functions import log_rollout
from miles.utils.arguments import parse_args
from miles.utils.errors import UserError
from miles.utils.types import Sample


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("grpo", [0.70710, 0.70710, -0.70710, 0, 0]),
        ("gspo --disable-grpo-std-normalization", [1, 1, -1, 0, 0]),
        ("dr_grpo", [1, 1, -1, 0, 0]),
        ("rloo", [2, 2, -2, 0, 0]),
        ("ppo", [3, 3, 1, 5, 0]),
        ("reinforce_plus_plus", [3, 3, 1, 5, 0]),
        ("grpo --disable-rewards-normalization", [3, 3, 1, 5, 0]),
    ],
)
def test_rewards_are_shaped_by_the_estimator(engine_flags, flags, expected):
    """Two pieces of one rollout, another of its group, a group of one, and a reward that abstained."""
    config = parse_args([*engine_flags, "--advantage-estimator", *flags.split()])
    samples = [
        Sample(index=0, group_index=0, rollout_id=0, reward=3.0),
        Sample(index=1, group_index=0, rollout_id=0, reward=3.0),
        Sample(index=2, group_index=0, reward=1.0),
        Sample(index=3, group_index=1, reward=5.0),
        Sample(index=4, group_index=1, reward=None),
    ]
    raw, shaped = Hooks().shape_rewards(config, samples)
    assert raw == [3, 3, 1, 5, None] and shaped == pytest.approx(expected, abs=1e-4)


def finished(index, **fields):
    return Sample(index=index, status=Sample.Status.COMPLETED, **fields)


def test_counts_are_checked():
    samples = [finished(i) for i in range(4)]
    check_complete(samples, 4)
    with pytest.raises(RuntimeError, match="asked for 5 rollouts, got 4 in 4"):
        check_complete(samples, 5)
    with pytest.raises(RuntimeError, match="got 3 in 4 samples, of which 0 are pieces and 1 came twice"):
        check_complete([*samples[:3], finished(0)], 4)
    with pytest.raises(RuntimeError, match="got 4 in 5 samples, of which 0 are pieces and 1 came twice"):
        check_complete([*samples, finished(3)], 4)
    # Pieces of one trajectory share its index and stand for one rollout; each of them is there once.
    pieces = [finished(3, rollout_id=3), finished(3, rollout_id=3)]
    check_complete([*samples[:3], *pieces], 4)
    with pytest.raises(RuntimeError, match="got 4 in 6 samples, of which 3 are pieces"):
        check_complete([*samples[:3], *pieces, pieces[0]], 4)
    # A generation that failed for good is an outcome.
    samples[1].status = Sample.Status.FAILED
    check_complete(samples, 4)
    samples[2].status = Sample.Status.ABORTED
    with pytest.raises(RuntimeError, match="1 of 4 samples are not finished: {2: 'aborted'}"):
        check_complete(samples, 4)


def groups_of(*rewards):
    """One group a list of rewards, each of a response of two tokens."""
    indices = itertools.count()
    return [
        [
            finished(
                next(indices),
                group_index=number,
                tokens=[97, 98, 99],
                response_length=2,
                rollout_log_probs=[-1.0, -2.0],
                weight_versions=["1"],
                reward=reward,
            )
            for reward in group
        ]
        for number, group in enumerate(rewards)
    ]


def test_shards_and_metrics_of_a_rollout(engine_flags, put):
    config = parse_args([*engine_flags, "--global-batch-size", "8"])
    groups = groups_of([1.0, 0.0, 1.0, 0.0], [1.0] * 4, [0.0] * 4, [None, 1.0, 0.0, 0.0])
    result = training_data(config, Hooks(), 5, groups, 1, {"perf/rollout_time": 2.0}, 2.0)
    (shard,) = put
    assert result.shards == [0] and len(shard.steps) == 2 and len(shard.batch) == 16
    assert shard.batch["rewards"][:4] == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)
    assert result.metrics["perf/rollout_time"] == 2.0
    assert result.metrics["rollout/raw_reward"] == pytest.approx(7 / 15)
    assert result.metrics["rollout/none_reward_ratio"] == 1 / 16

    alone = training_data(config.model_copy(update={"debug_rollout_only": True}), Hooks(), 5, groups, 1, {}, 2.0)
    assert alone.shards == [] and alone.metrics.keys() == result.metrics.keys() - {"perf/rollout_time"}


def test_a_log_function_sees_all_and_may_leave_out_what_is_said_of_a_rollout(engine_flags, put):
    config, seen = parse_args(engine_flags), []

    def log(rollout_id, config, samples, metrics, seconds):
        seen.append((rollout_id, len(samples), metrics["rollout/raw_reward"], seconds))
        return leave_out

    groups, known = groups_of([1.0, 0.0, 1.0, 0.0], [1.0] * 4, [0.0] * 4, [1.0] * 4), {"perf/rollout_time": 2.0}
    for leave_out in (False, True):
        result = training_data(config, Hooks(log_rollout=log_rollout(log)), 5, groups, None, known, 2.0)
        assert ("rollout/raw_reward" in result.metrics) != leave_out
        assert result.metrics["perf/rollout_time"] == 2.0
    assert seen == [(5, 16, 10 / 16, 2.0)] * 2


def test_a_rollout_without_log_probs_is_refused(engine_flags, put):
    groups = groups_of(*[[1.0, 0.0, 1.0, 0.0]] * 4)
    groups[0][1].rollout_log_probs = groups[0][2].rollout_log_probs = None
    with pytest.raises(ValueError, match="2 of 16 samples have no rollout_log_probs, sample 1 first"):
        training_data(parse_args(engine_flags), Hooks(), 5, groups, None, {}, 2.0)


@pytest.mark.parametrize("version, stale", [(None, None), (1, [0] * 15 + [1]), (2, [1] * 15 + [0])])
def test_what_older_weights_wrote_is_marked(engine_flags, put, version, stale):
    groups = groups_of(*[[1.0, 0.0, 1.0, 0.0]] * 4)
    groups[-1][-1].weight_versions = ["2"]
    training_data(parse_args(engine_flags), Hooks(), 5, groups, version, {}, 2.0)
    (shard,) = put
    if stale is None:
        assert "stale" not in shard.batch
    else:
        assert shard.batch["stale"].tolist() == stale


@pytest.fixture
def put(monkeypatch):
    """What was put into Ray's store; a reference is its place in it."""
    values = []
    monkeypatch.setattr(
        "miles.ray.rollout.training_data.ray.put", lambda value: values.append(value) or len(values) - 1
    )
    return values


def test_failed_rewards_are_bounded_over_all_groups():
    fine, bad = RewardCounts(10, 0, 0, None), RewardCounts(10, 0, 1, "sample 3: ZeroDivisionError")
    check_errors([fine, bad], 0.05)
    with pytest.raises(UserError, match="failed for 1 of 20 samples.*sample 3: ZeroDivisionError"):
        check_errors([fine, bad], 0.04)
