"""How a run ends that fails: what stands on the screen, and what in `error.log` in the run's folder."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from ray.exceptions import RayError, RayTaskError

from miles.config import RunConfig
from miles.config.secrets import masked, secrets_of
from miles.utils.errors import sentence_of

PACKAGES = ("miles", "ray", "torch", "sglang", "megatron-core", "transformers", "transformer-engine", "flash-attn")
# Of environment variables only the name says that they are secret: a short value may be anything.
SHORTEST_SECRET = 8
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@contextlib.contextmanager
def written_down(config: RunConfig) -> Iterator[None]:
    """Around a run: an exception ends the program with exit code 1 and is written to `error.log` in the run's folder.

    A UserError shows its sentence on the screen, any other exception its traceback; the last line names the file.
    Ctrl-C and the exit that SIGTERM asks for pass.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    # torch and asyncio have errors that are no Exception.
    except BaseException as error:
        secrets = [*secrets_of(config.model_dump()), *_of_environment()]
        report = _COLOUR.sub("", "".join(traceback.format_exception(error)))
        sentence = sentence_of(error, inside)
        shown = report.rstrip() if sentence is None else f"error: {sentence}"
        print(masked(shown, secrets), file=sys.stderr)
        assert config.run_dir is not None, "it is derived where it is not given"
        print(_write(Path(config.run_dir) / "error.log", masked(_entry(report, secrets), secrets)), file=sys.stderr)
        sys.exit(1)


def inside(error: BaseException) -> BaseException:
    """What Ray wrapped in an error of its own, where it still has it; else the error itself."""
    while isinstance(error, RayError):
        wrapped = error.cause if isinstance(error, RayTaskError) else error.__cause__
        if wrapped is None:
            break
        error = wrapped
    return error


def _of_environment() -> list[str]:
    return [secret for secret in secrets_of(os.environ) if len(secret) >= SHORTEST_SECRET]


def _entry(report: str, secrets: list[str]) -> str:
    command = shlex.join(masked(word, secrets) for word in [sys.executable, *sys.argv])
    versions = [f"Python {platform.python_version()}", platform.platform()]
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    time = datetime.now().astimezone().isoformat(timespec="seconds")
    return f"time: {time}\ncommand: {command}\nversions: {', '.join(versions)}\n{report}\n"


def _write(path: Path, entry: str) -> str:
    """Put the entry behind those of earlier runs in this folder; returns what to say about it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(entry)
    except OSError as error:
        return f"where it came from could not be written: {error}"
    return f"where it came from, the command line and the versions: {path}"
