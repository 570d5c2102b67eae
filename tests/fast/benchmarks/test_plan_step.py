"""benchmarks/plan_step.py: every case runs, and what it says of the balance is so."""

import sys
from pathlib import Path

import numpy as np
import pytest

from miles.hf.flops import ForwardFlops
from miles.training.schedule import plan_rollout

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def plan_step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the benchmark adds the root to it
    import plan_step

    return plan_step


def test_cases(plan_step):
    flops = ForwardFlops(per_token=8e9, per_response_token=8e8, per_pair={None: 6e5})
    rows = [plan_step.row_of(way, step, 4, 6000, flops) for way, step, ranks in plan_step.CASES if ranks != 8]
    assert [row["steps"] for row in rows] == [1] * 5 + [2] * 5  # a step of 4,096 and the rest
    for row in rows:
        assert row["tokens"] >= 1 and row["work"] >= 1 and (row["used"] or 1) <= 1
    by_case = {row["case"]: row for row in rows[5:]}
    assert by_case["dynamic"]["tokens"] < by_case["in turn"]["tokens"]
    assert by_case["dynamic, flops"]["work"] < by_case["dynamic"]["work"] < by_case["in turn"]["work"]


def test_shards(plan_step):
    samples = plan_step.answered(16, 2000)
    # 4 bytes an id, 4 a log-probability, 1 a mask; the lists that they read as would take more than ten times that.
    held = [sum(values.array.nbytes for values in vars(s).values() if hasattr(values, "array")) for s in samples]
    assert held == [4 * 2000 + 5 * 976] * 16
    row = plan_step.shards_of(samples, 4)
    assert row["tokens"] == 16 * 2000 and row["peak GB"] > 0


def test_busiest_rank(plan_step):
    batch = plan_step.make_batch(4, 1)
    plans = plan_rollout(
        batch, global_batch_size=2, dp_size=2, micro_batch_size=1, max_tokens=None, per_token_loss=False
    )
    assert plan_step.spread(plans, np.array([1.0, 3.0, 2.0, 2.0])) == (3 + 2) / (2 + 2)
