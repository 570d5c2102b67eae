"""benchmarks/soak.py: it notices what it is there to notice, and a small one holds."""

import argparse
import sys
from collections import Counter
from pathlib import Path

import pytest

from miles.utils.types import Sample

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])
    import soak

    return soak


def group(index, **changes):
    fields = {"reward": 1.0, "response_length": 1, "status": Sample.Status.COMPLETED} | changes
    return [Sample(group_index=index, index=2 * index + i, tokens=[1, 2], **fields) for i in range(2)]


def test_every_sample_once(soak):
    accounts = soak.Accounts()
    accounts.book([group(0), group(2)])
    accounts.check(6, [2, 3])
    for asked, waiting, message in (
        (6, [2], r"lost \[3\]"),
        (6, [2, 3, 3], r"doubled \{3: 2\}"),
        (6, [2, 3, 0], r"doubled \{0: 2\}"),
        (5, [2, 3], r"foreign \[5\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            accounts.check(asked, waiting)


@pytest.mark.parametrize("changes", [{"reward": None}, {"reward": 2.0}, {"status": Sample.Status.ABORTED}])
def test_only_finished_groups_are_trained_on(soak, changes):
    for broken in (group(0, **changes), group(0)[:1]):
        with pytest.raises(RuntimeError, match="not to be trained on"):
            soak.Accounts().book([broken])


def test_memory_is_bounded(soak):
    parts = [soak.Part(1, 1.0, rss, Counter()) for rss in (100.0, 500.0, 110.0)]
    assert soak.check_memory(parts, 10) == 10
    with pytest.raises(RuntimeError, match=r"grew by 10 MiB after the warm-up: \[100, 500, 110\]"):
        soak.check_memory(parts, 9)


@pytest.mark.slow
def test_two_engines_one_killed_midway(soak):
    parts, _ = soak.run(argparse.Namespace(requests=2000, rollouts_a_part=4, memory_bound=10.0))
    assert [part.requests for part in parts] == [200] * soak.PARTS
    assert sum(part.metrics["rollout/request_retries"] for part in parts) > 0
