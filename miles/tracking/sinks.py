"""Where metrics go beside the run's folder: W&B, MLflow, trackio, all behind one interface."""

import contextlib
import importlib
import importlib.util
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from miles.config import RunConfig
from miles.utils.errors import UserError, one_line

logger = logging.getLogger(__name__)

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny sqlalchemy alembic", "trackio": "trackio"}
RUN_IDS = "trackers.json"  # in the run's folder


class Sink(Protocol):
    """One tracker's run.

    Attributes:
        run_id: what a resumed run goes on with.
        errors: what `write` and `close` raise where the tracker does not work.
    """

    run_id: str
    errors: tuple[type[Exception], ...]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """All metrics of the step of one rollout; those that are not finite too."""
        ...

    def close(self, *, failed: bool) -> None:
        """The run has ended."""
        ...


# Of the configuration, the run's folder, and the id of a run that is gone on with.
Start = Callable[[RunConfig, Path, str | None], Sink]


class Sinks:
    """The trackers that work, by their names. One that fails is told no more, and the run goes on."""

    def __init__(self) -> None:
        self._working: dict[str, Sink] = {}

    def add(self, name: str, sink: Sink) -> None:
        """One more that is told."""
        self._working[name] = sink

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """All metrics of a step, to each of them."""
        for name, sink in list(self._working.items()):
            try:
                sink.write(step, values)
            except sink.errors as error:
                del self._working[name]
                logger.error("%s failed at step %d, and is told no more: %s", name, step, one_line(error))

    def close(self, *, failed: bool) -> None:
        """Ends each of them."""
        for name, sink in self._working.items():
            try:
                sink.close(failed=failed)
            except sink.errors as error:
                logger.error("%s failed at the end: %s", name, one_line(error))
        self._working = {}


@contextlib.contextmanager
def trackers(config: RunConfig) -> Iterator[Sinks]:
    """The trackers that `config` names, for as long as a run lasts.

    What one goes on with where the run is resumed stands in `trackers.json` in the run's folder.

    Raises:
        UserError: one is not installed, does not answer, or refuses: before anything else of the run starts.
    """
    assert config.run_dir is not None, "it is derived where it is not given"
    folder = Path(config.run_dir)
    run_ids = _read(folder / RUN_IDS) if config.load is not None and not config.finetune else {}
    sinks, failed = Sinks(), True
    try:
        for name, start in _starts(config).items():
            sink = start(config, folder, run_ids.get(name))
            sinks.add(name, sink)
            run_ids[name] = sink.run_id
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RUN_IDS).write_text(json.dumps(run_ids, indent=1) + "\n")
        yield sinks
        failed = False
    finally:
        sinks.close(failed=failed)


def _starts(config: RunConfig) -> dict[str, Start]:
    """What begins a run with each tracker, whose package is imported only here."""
    chosen = {"wandb": config.use_wandb, "mlflow": config.use_mlflow, "trackio": config.use_trackio}
    return {name: _start_of(name) for name, used in chosen.items() if used}


def _start_of(name: str) -> Start:
    if importlib.util.find_spec(name) is None:
        raise UserError(f"--use-{name} needs a package that is not installed: pip install {PACKAGES[name]}")
    return importlib.import_module(f"miles.tracking.{name}_sink").start


def _read(path: Path) -> dict[str, str]:
    return json.loads(path.read_text()) if path.exists() else {}
