"""Seconds of phases, on a clock that the tests turn."""

import pytest

from miles.utils import stopwatch
from miles.utils.stopwatch import Stopwatch


class Clock:
    """Stands in for the time module."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def test_a_phase_is_added_up(clock):
    watch = Stopwatch()
    for seconds in (1, 2):
        with watch("train"):
            clock.passes(seconds)
        clock.passes(10)
    with watch("save"):
        clock.passes(4)
    assert watch.seconds == {"train": 3, "save": 4}
    assert watch.metrics == {"perf/train_time": 3, "perf/save_time": 4}


def test_phases_may_lie_in_one_another(clock):
    watch = Stopwatch()
    with watch("step"):
        clock.passes(1)
        with watch("forward"):
            clock.passes(2)
            with watch("step"):
                clock.passes(4)
        clock.passes(8)
    assert watch.seconds == {"step": 15 + 4, "forward": 6}


def test_what_a_phase_has_begun_is_waited_for(clock):
    watch = Stopwatch(wait=lambda: clock.passes(5))
    with watch("train"):
        clock.passes(1)
    assert watch.seconds == {"train": 6}


def test_a_phase_that_fails_does_not_count(clock):
    watch = Stopwatch()
    with pytest.raises(OSError), watch("save"):
        clock.passes(3)
        raise OSError
    assert watch.seconds == {}
