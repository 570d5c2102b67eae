import ast
import re
from pathlib import Path

import pytest

from miles.rollout.metrics import eval_metrics, rollout_metrics
from miles.tracking.metrics import METRICS, describe
from miles.utils.types import Sample


def samples_of(rewards, group_size=2, **fields):
    fields = {"tokens": [1, 2, 3, 4], "response_length": 3, "status": Sample.Status.COMPLETED} | fields
    return [Sample(index=i, group_index=i // group_size, reward=reward, **fields) for i, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    "name, words",
    [
        ("train/loss", "minimised"),
        ("train/lr-pg_0", "learning rate"),
        ("critic-train/value_loss", "values and returns"),
        ("critic-train/lr-pg_0", "learning rate"),
        ("eval/gsm8k-test", "mean reward on an evaluation set"),
        ("eval/gsm8k-test-truncated_ratio", "cut off"),
        ("eval/gsm8k-test/response_len/mean", "response tokens"),
        ("rollout/zero_std/count_0.5", "every sample"),
    ],
)
def test_describe(name, words):
    assert words in describe(name)


@pytest.mark.parametrize(
    "name",
    ["train/los", "critic-train/los", "critic-rollout/rewards", "eval/", "eval/a/b", "loss", "rollout/zero_std/count_"],
)
def test_describe_knows_nothing_else(name):
    assert describe(name) is None


def test_every_line_of_the_registry_is_short():
    assert all(doc and len(doc) < 100 and not doc.endswith(".") for doc in METRICS.values())


def test_every_metric_named_in_the_code_is_registered():
    files = (Path(__file__).parents[3] / "miles").rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    literals = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    names = {name for name in literals if re.fullmatch(r"(train|rollout|perf)/[a-z][\w/-]*\w", name)}
    assert len(names) > 20
    assert not [name for name in sorted(names) if describe(name) is None]


def test_rollout_metrics_by_hand():
    samples = samples_of([1.0, 0.0, 1.0, 1.0, 0.0, -0.0, None, 0.5])
    samples[0].loss_mask = [1, 0, 0]
    samples[1].status = Sample.Status.TRUNCATED
    samples[2].rollout_log_probs, samples[2].weight_versions = [-1.0, -2.0, -3.0], ["1", "2"]
    samples[7].remove_sample = True
    metrics = rollout_metrics(samples, [0.5] * 8)
    assert metrics == {
        "rollout/raw_reward": 0.5,
        "rollout/rewards": 0.5,
        "rollout/none_reward_ratio": 1 / 8,
        "rollout/removed_ratio": 1 / 8,
        "rollout/truncated_ratio": 1 / 8,
        "rollout/response_len/mean": 22 / 8,
        "rollout/response_len/median": 3.0,
        "rollout/response_len/max": 3.0,
        "rollout/response_len/min": 1.0,
        "rollout/total_lengths": 4.0,
        "rollout/rollout_log_probs": -2.0,
        "rollout/weight_version/mixed_version_ratio": 1 / 8,
        "rollout/zero_std/count_0.0": 1.0,
        "rollout/zero_std/count_1.0": 1.0,
        "rollout/zero_std/all_zero_percentage": 100 / 3,
        "rollout/zero_std/all_one_percentage": 100 / 3,
    }
    assert all(describe(name) for name in metrics)


def test_supervised_rollouts_have_no_reward_metrics():
    metrics = rollout_metrics(samples_of([None, None]), None)
    assert "rollout/raw_reward" not in metrics and metrics["rollout/response_len/mean"] == 3


def test_eval_metrics_leave_abstained_rewards_out():
    metrics = eval_metrics("demo", samples_of([1.0, None, 0.0, 1.0], status=Sample.Status.TRUNCATED))
    assert metrics["eval/demo"] == pytest.approx(2 / 3)
    assert metrics["eval/demo-none_reward_ratio"] == 0.25
    assert metrics["eval/demo-truncated_ratio"] == 1
    assert all(describe(name) for name in metrics)


def test_no_samples_is_refused():
    with pytest.raises(ValueError, match="demo"):
        eval_metrics("demo", [])
    with pytest.raises(ValueError, match="without samples"):
        rollout_metrics([], None)
