"""trackio, which keeps a run in a local database."""

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from miles.config import RunConfig
from miles.config.secrets import without_secrets

if TYPE_CHECKING:
    from trackio import Run


class TrackioSink:
    """A run of trackio, whose steps are those of rollouts."""

    errors = (sqlite3.Error, OSError)

    def __init__(self, run: "Run"):
        self._run = run
        self.run_id = run.name

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """Waits until all is in the database."""
        self._run.finish()


def start(config: RunConfig, folder: Path, run_id: str | None) -> TrackioSink:
    """Begin a run, or go on with that of the name `run_id`."""
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read where trackio is imported
    import trackio

    return TrackioSink(
        trackio.init(
            project=config.trackio_project,
            name=run_id or folder.name,
            resume="never" if run_id is None else "allow",
            config=without_secrets(config.model_dump()),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    )
