"""On what kind of filesystem a folder is: a folder in memory is no place for what must leave the host."""

from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = ("tmpfs", "ramfs")


def filesystem_of(folder: Path) -> str | None:
    """Type of the filesystem that holds a folder or would hold it; None where the system has no list of mounts."""
    if not MOUNTS.exists():
        return None
    kinds = {Path(mount): kind for _, mount, kind, *_ in map(str.split, MOUNTS.read_text().splitlines())}
    folder = folder.resolve()
    return next((kinds[parent] for parent in (folder, *folder.parents) if parent in kinds), None)
