"""Where checkpoints lie, what belongs to one, and which of them is loaded.

`<root>/iter_0000012` is whole, with a list of its files in it; it was written as `<root>/.iter_0000012.partial`. The
marker file `latest_checkpointed_iteration.txt` names the newest. Nothing here reads what Megatron or torch wrote.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from miles.utils.errors import UserError

logger = logging.getLogger(__name__)

MARKER = "latest_checkpointed_iteration.txt"
# In a checkpoint's folder. The reference is there where it is not --ref-load any more; a critic's has no data and no
# samples.
MANIFEST = "manifest.json"
MODEL, REFERENCE, RNG = "model", "reference", "rng"
DATA_FILE, SAMPLES_FILE = "data_source.json", "samples.json"
SHOWN = 4


def checkpoint_folder(root: str | Path, rollout_id: int) -> Path:
    """The folder of the checkpoint taken after `rollout_id`."""
    return Path(root) / f"iter_{rollout_id:07d}"


def partial_folder(root: str | Path, rollout_id: int) -> Path:
    """Where that checkpoint is written until it is whole."""
    return Path(root) / f".iter_{rollout_id:07d}.partial"


def random_state_file(rank: int, ranks: int) -> str:
    """Where a rank's random state is, within the checkpoint."""
    return f"{RNG}/rank_{rank:05d}_of_{ranks:05d}.pt"


# Writing


def begin_checkpoint(root: str | Path, rollout_id: int) -> Path:
    """Make the empty folder that the checkpoint of `rollout_id` is written to, and return it."""
    partial, folder = partial_folder(root, rollout_id), checkpoint_folder(root, rollout_id)
    if (partial / MANIFEST).exists() and not folder.exists():
        partial.rename(folder)  # a run was killed while it put this one in the place of another: it may be the newest
    for left in (partial, *Path(root).glob(".iter_*.old")):
        shutil.rmtree(left, ignore_errors=True)
    for name in (MODEL, RNG):
        (partial / name).mkdir(parents=True)
    return partial


def finish_checkpoint(root: str | Path, rollout_id: int, beside: str | Path | None = None) -> None:
    """Declare what was written since `begin_checkpoint` to be the newest checkpoint; on disk when it returns.

    At any moment the marker names a checkpoint that `find_checkpoint` finds whole.

    Args:
        beside: another folder of checkpoints, a critic's, in which the same is done.

    Raises:
        ValueError: a part is not there: the ranks do not see one and the same folder.
    """
    # The critic's first: an actor's checkpoint never lacks it. All that takes long is done before the renames.
    roots = [Path(root)] if beside is None else [Path(beside), Path(root)]
    for place in roots:
        _write_manifest(partial_folder(place, rollout_id))
    replaced = [_put_in_place(place, rollout_id) for place in roots]
    for place in roots:
        _write(place / MARKER, f"{rollout_id}\n")
    for old in replaced:
        shutil.rmtree(old, ignore_errors=True)


def remove_checkpoint(root: str | Path, rollout_id: int, beside: str | Path | None = None) -> None:
    """Take away the checkpoint of `rollout_id`, which is not the newest, and a critic's `beside` it.

    What a killed run leaves of it is no checkpoint, and is taken away by the next `begin_checkpoint`.
    """
    # The critic's last: an actor's checkpoint never lacks it.
    for place in (Path(root), *(() if beside is None else (Path(beside),))):
        folder, old = locate(place, rollout_id), partial_folder(place, rollout_id).with_suffix(".old")
        if folder.is_dir():
            folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)


def _write_manifest(partial: Path) -> None:
    if faults := list(_faults_without_manifest(partial)):
        raise UserError(
            f"the checkpoint in {partial} is not whole on the driver's machine: {_some(faults)}; --save must be one "
            "folder that the machines of all ranks share"
        )
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    _write(partial / MANIFEST, json.dumps({"files": sizes}, indent=1) + "\n")


def _put_in_place(root: Path, rollout_id: int) -> Path:
    """Give a finished folder its name; returns where the one is that had it, in a run that is repeated."""
    partial, folder = partial_folder(root, rollout_id), checkpoint_folder(root, rollout_id)
    old = partial.with_suffix(".old")
    if folder.exists():
        # Until the next rename the new one, which is whole, is found under its first name.
        folder.rename(old)
    partial.rename(folder)
    return old


def _write(path: Path, text: str) -> None:
    """Replace a file at once; it is on disk when this returns, and so are renames in its folder."""
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Finding


def find_checkpoint(root: str | Path, step: int | None, beside: str | Path | None = None) -> tuple[int, Path] | None:
    """The checkpoint to load from `root`: that of `step`, else the newest whole one; None if nothing is saved yet.

    The newest is the marker's, or one before it, with a warning that says what is missing in those after it.

    Args:
        beside: another folder of checkpoints, a critic's, whose one of the same rollout must be whole as well.

    Raises:
        ValueError: the checkpoint of `step`, or any, is not whole.
    """
    roots = [Path(root)] if beside is None else [Path(root), Path(beside)]
    if step is not None:
        if faults := _faults_of(roots, step):
            others = [other for other in _present(root) if other != step and not _faults_of(roots, other)]
            raise UserError(
                f"{'; '.join(faults)}; whole in {root} are the checkpoints of these rollouts: "
                f"{', '.join(map(str, others)) or 'none'}"
            )
        return step, locate(root, step)
    newest = newest_step(root)
    if newest is None:
        return None
    broken: list[str] = []
    for candidate in sorted({newest, *_present(root)}, reverse=True):
        if candidate > newest:
            continue  # left behind by a run that was killed, or of one that is repeated
        faults = _faults_of(roots, candidate)
        if not faults:
            if broken:
                logger.warning("%s: the checkpoint before, %s, is taken", "; ".join(broken), locate(root, candidate))
            return candidate, locate(root, candidate)
        broken += faults
    raise UserError(f"{'; '.join(broken)}; none in {root} is whole: give another folder, or none to begin anew")


def newest_step(root: str | Path) -> int | None:
    """The rollout that the marker in `root` names; None without a marker. Raises ValueError if it names none."""
    marker = Path(root) / MARKER
    if not marker.exists():
        return None
    text = marker.read_text().strip()
    if not text.isdigit():
        raise UserError(f"{marker} holds {text!r}, expected the number of a rollout")
    return int(text)


def locate(root: str | Path, step: int) -> Path:
    """The folder that holds the checkpoint of `step`, if there is one."""
    folder, partial = checkpoint_folder(root, step), partial_folder(root, step)
    return partial if (partial / MANIFEST).exists() and not folder.exists() else folder


def _present(root: str | Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(root).glob("iter_*") if path.name[5:].isdigit())


def _faults_of(roots: Sequence[Path], step: int) -> list[str]:
    """A sentence for each of the folders whose checkpoint of `step` is not whole."""
    sentences = []
    for root in roots:
        folder = locate(root, step)
        if not folder.is_dir():
            sentences.append(f"there is no checkpoint {folder.name} in {root}")
        elif faults := list(_faults(folder)):
            sentences.append(f"the checkpoint {folder} is not whole: {_some(faults)}")
    return sentences


def _faults(folder: Path) -> Iterator[str]:
    manifest = folder / MANIFEST
    if not manifest.exists():  # older than manifests
        yield from _faults_without_manifest(folder)
        return
    try:
        sizes = json.loads(manifest.read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        yield f"{MANIFEST} can't be read ({error})"
        return
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size} bytes of {size}"


def _faults_without_manifest(folder: Path) -> Iterator[str]:
    """What can be known to be missing, from what is there."""
    needed: list[str] = []
    for part in (MODEL, REFERENCE):
        if part == REFERENCE and not (folder / part).is_dir():
            continue
        needed.append(f"{part}/.metadata")
        index = folder / part / ".metadata"
        content = index.read_bytes() if index.is_file() else b""
        if content and not content.endswith(b"."):  # the last byte of a pickle
            yield f"{part}/.metadata is cut off"
        # The index of torch.distributed.checkpoint, in whose format trainers write, names each shard as it is.
        needed += sorted({f"{part}/{name.decode()}" for name in re.findall(rb"__\d+_\d+\.distcp", content)})
    sizes = [int(path.stem.rpartition("_")[2]) for path in folder.glob(f"{RNG}/rank_*_of_*.pt")]
    needed += [random_state_file(rank, max(sizes)) for rank in range(max(sizes))] if sizes else [f"{RNG}/rank_00000"]
    if any((folder / name).exists() for name in (DATA_FILE, SAMPLES_FILE)):
        needed += [DATA_FILE, SAMPLES_FILE]
    yield from (f"{name} is missing" for name in needed if not (folder / name).is_file())


def _some(faults: Sequence[str]) -> str:
    rest = len(faults) - SHOWN
    return ", ".join(faults[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
