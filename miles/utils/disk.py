"""Failures to write, in a sentence that names the folder and the room that is left in it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.utils.errors import AnotherRankFailed, UserError

# With less than this free a writer that fails is taken to have filled the disk: torch's own does not say why it failed.
FULL_BYTES = 16 * 2**20


@contextmanager
def writing(flag: str, folder: str | Path) -> Iterator[None]:
    """Around all that writes under `folder`, which `flag` names.

    Raises:
        ValueError: an error of the system, or any other where the disk is full, with the folder and its free bytes.
    """
    try:
        yield
    except (UserError, AnotherRankFailed):
        raise
    except Exception as error:
        free = free_bytes(folder)
        # safetensors has the system's errors in errors of its own.
        if not isinstance(error, OSError) and "os error" not in str(error) and free >= FULL_BYTES:
            raise
        raise UserError(
            f"writing to {flag} {folder} failed ({type(error).__name__}: {error}); {free:,} bytes are free there: make "
            "room, or give another folder"
        ) from error


def free_bytes(folder: str | Path) -> int:
    """Of the file system that `folder` is on, or would be."""
    place = Path(folder)
    return shutil.disk_usage(next(there for there in (place, *place.parents) if os.path.exists(there))).free
