"""Seconds of the phases of a rank's work."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds of named phases, as perf metrics: `with watch("log_probs")` adds to `perf/log_probs_time`.

    A phase ends when the GPU has done its work. Phases may stand in one another; each counts all of its time.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a phase; what fails is not counted."""
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.metrics[f"perf/{name}_time"] += time.perf_counter() - started
