"""Where checkpoints lie and which of them counts: `<root>/iter_0000012` and the marker file that names the latest."""

import os
from pathlib import Path

from miles.utils.errors import UserError

MARKER = "latest_checkpointed_iteration.txt"


def checkpoint_folder(root: str | Path, rollout_id: int) -> Path:
    """The folder of the checkpoint taken after `rollout_id`."""
    return Path(root) / f"iter_{rollout_id:07d}"


def write_marker(root: str | Path, rollout_id: int) -> None:
    """Declare the checkpoint of `rollout_id` complete; atomic, and on disk when it returns."""
    folder = Path(root)
    temporary = folder / f"{MARKER}.new"
    with temporary.open("w") as file:
        file.write(f"{rollout_id}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MARKER)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(root: str | Path, step: int | None) -> tuple[int, Path] | None:
    """The checkpoint to load from `root`: that of `step`, else the one the marker names, else None (nothing saved yet).

    Raises:
        ValueError: `step` or the marker names a checkpoint that is not there.
    """
    marker = Path(root) / MARKER
    if step is None:
        if not marker.exists():
            return None
        text = marker.read_text().strip()
        if not text.isdigit():
            raise UserError(f"{marker} holds {text!r}, expected the number of a rollout")
        step = int(text)
    folder = checkpoint_folder(root, step)
    if not folder.is_dir():
        present = sorted(path.name for path in Path(root).glob("iter_*")) if Path(root).is_dir() else []
        raise UserError(f"no checkpoint {folder.name} in {root}; there are: {', '.join(present) or 'none'}")
    return step, folder
