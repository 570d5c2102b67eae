"""A stopwatch for the phases of something longer."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the seconds of phases: `with watch("train")` adds to `watch.seconds["train"]`.

    Phases may lie in one another; each has its whole time. One that fails does not count.

    Args:
        wait: called before a phase's end is read: waits for what the phase has begun, as work on a GPU.

    Attributes:
        seconds: of each phase so far, in the order of their ends.
    """

    def __init__(self, wait: Callable[[], object] | None = None):
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._wait = wait

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """The seconds of the block are the phase's."""
        start = time.monotonic()
        yield
        if self._wait is not None:
            self._wait()
        self.seconds[phase] += time.monotonic() - start

    @property
    def metrics(self) -> dict[str, float]:
        """{`perf/<phase>_time`: seconds}."""
        return {f"perf/{phase}_time": seconds for phase, seconds in self.seconds.items()}
