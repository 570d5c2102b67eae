"""The progress bar of a generation, drawn on the driver's terminal by Ray."""

import time

from ray.experimental import tqdm_ray

SHOW_AFTER_SECONDS = 3.0


class Progress:
    """Counts finished samples; a generation shorter than three seconds shows no bar. Close it in the end."""

    def __init__(self, description: str, total: int) -> None:
        self._description = description
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._bar: tqdm_ray.tqdm | None = None

    def update(self, count: int) -> None:
        """`count` more samples are finished."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._start > SHOW_AFTER_SECONDS:
            self._bar = tqdm_ray.tqdm(desc=self._description, total=self._total, unit="samples")
            self._bar.update(self._done)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.close()
