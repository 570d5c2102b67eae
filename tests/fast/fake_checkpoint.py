"""Checkpoints without weights: files with the names that Megatron, torch and Miles give theirs."""

import pickle
from pathlib import Path

from miles.utils.checkpoint_folder import begin_checkpoint, finish_checkpoint, random_state_file


def write_model(folder: Path, shards: int = 2) -> None:
    """A model's part as Megatron writes it. Its index is a pickle that names the shards."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"__{rank}_0.distcp" for rank in range(shards)]
    for name in names:
        (folder / name).write_bytes(b"weights")
    (folder / ".metadata").write_bytes(pickle.dumps({"a.weight": names}))
    (folder / "metadata.json").write_text("{}")


def write_ranks(folder: Path, ranks: int = 2) -> None:
    """What an actor's or a critic's ranks write."""
    write_model(folder / "model")
    (folder / "rng").mkdir(exist_ok=True)
    for rank in range(ranks):
        (folder / random_state_file(rank, ranks)).write_bytes(b"random")


def write_rollout(folder: Path) -> None:
    """What the RolloutManager writes."""
    for name in ("data_source.json", "samples.json"):
        (folder / name).write_text("{}")


def write_parts(folder: Path) -> None:
    """All of an actor's checkpoint."""
    write_ranks(folder)
    write_rollout(folder)


def save_fake(root: Path, *rollouts: int, rollout: bool = True) -> None:
    """A whole checkpoint of each rollout, the last the newest."""
    for rollout_id in rollouts:
        (write_parts if rollout else write_ranks)(begin_checkpoint(root, rollout_id))
        finish_checkpoint(root, rollout_id)
