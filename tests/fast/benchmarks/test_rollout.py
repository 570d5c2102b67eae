"""benchmarks/rollout.py: both sides are asked for the same, and the table is of what was measured."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])
    import rollout

    return rollout


def test_lengths_are_spread_and_fixed(benchmark):
    given = [{"sampling_seed": seed, "max_new_tokens": 99} for seed in range(100)]
    fixed = benchmark.Lengths(3, 6).fixed(given)
    assert {one["max_new_tokens"] for one in fixed} == {3, 4, 5, 6} and all(one["ignore_eos"] for one in fixed)
    assert given[0] == {"sampling_seed": 0, "max_new_tokens": 99}, "the pool's parameters are not edited"


def test_overhead_is_over_the_raw_runs_beside_it(benchmark):
    runs = [[(1.0, 0.1), (2.2, 0.5), (3.0, 0.1)], [(4.0, 0.1), (4.0, 0.5), (4.0, 0.1)]]
    rows = {row["what"].strip(): row for row in benchmark.table(runs, {"reward": 0.15})}
    assert (rows["raw SGLang"]["median"], rows["Miles"]["median"]) == (3.0, pytest.approx(3.1))
    assert rows["overhead"]["median"] == pytest.approx((10 + 0) / 2)
    assert rows["noise"]["median"] == pytest.approx((200 + 0) / 2)
    assert rows["CPU, Miles"]["% of raw"] == pytest.approx(100 * 0.5 / 3)
    assert rows["other"]["median"] == pytest.approx(0.5 - 0.1 - 0.15)


def test_the_stand_in_answers_as_an_engine(benchmark):
    import orjson
    import stand_in_server

    from miles.rollout.answers import read_answer

    answer = read_answer(orjson.loads(stand_in_server.reply(5)))
    assert len(answer.ids) == len(answer.log_probs) == 5 and not answer.aborted
