"""What a configuration must satisfy for memory to move: the planner's own conditions, and those of the flags."""

import os
from collections.abc import Iterator
from pathlib import Path

from miles.config.names import flag_of
from miles.config.values import Values
from miles.residency.policy import policy_of

MOUNTS = Path("/proc/self/mounts")


def _planned_moves(v: Values) -> Iterator[str]:
    yield from policy_of(v).problems()


def _moving_for_nobody(v: Values) -> Iterator[str]:
    asked = [flag_of(name) for name in ("offload_train", "offload_rollout") if getattr(v, name)]
    if asked and not v.colocate:
        yield (
            f"{' and '.join(asked)} without --colocate: each side has GPUs of its own then, and nobody else wants the "
            "memory; add --colocate, or drop the offload"
        )


def _levels(v: Values) -> Iterator[str]:
    levels = v.offload_rollout_level
    for level in sorted({level for level in levels if levels.count(level) > 1}):
        yield f"--offload-rollout-level names {level} more than once; name it once"


def _master_weights(v: Values) -> Iterator[str]:
    if not v.rematerialize_param_from_master_weight:
        return
    if not v.bf16:
        yield (
            "--rematerialize-param-from-master-weight needs --bf16: in fp32 the weights are their own masters; drop one"
        )
    if not v.use_distributed_optimizer:
        yield (
            "--rematerialize-param-from-master-weight needs --use-distributed-optimizer, whose masters it rebuilds the "
            "weights from; drop --no-use-distributed-optimizer"
        )


def _streaming(v: Values) -> Iterator[str]:
    dtype = v.stream_optimizer_state_moment_dtype
    if v.stream_optimizer_state_to_disk:
        if not v.use_distributed_optimizer:
            yield (
                "--stream-optimizer-state-to-disk needs --use-distributed-optimizer, whose buckets it streams; drop "
                "--no-use-distributed-optimizer"
            )
    elif dtype != "fp32" and v.needs_trainer:
        yield (
            f"--stream-optimizer-state-moment-dtype {dtype} has no effect without --stream-optimizer-state-to-disk; "
            "add that, or drop it"
        )


def _disk(v: Values) -> Iterator[str]:
    folder = v.offload_train_disk_dir
    if not v.trainer_uses_disk:
        if folder is not None and v.needs_engines and v.needs_trainer:
            yield (
                f"--offload-train-disk-dir {folder} has no effect without --offload-train-target disk or "
                "--stream-optimizer-state-to-disk; add one, or drop it"
            )
    elif folder is None:
        yield (
            f"--offload-train-disk-dir is not given, and its default is in $SCRATCH, else in /scratch, but "
            f"{scratch_folder()} is no folder here; give one on a disk of each node"
        )
    elif v.actor_num_nodes == 1 and (kind := _file_system(Path(folder))) in ("tmpfs", "ramfs"):
        # With more nodes the folder need not be the one that is seen here: each rank looks at its own.
        yield (
            f"--offload-train-disk-dir {folder} is in memory ({kind}), so that what goes there stays on the host; "
            "choose a folder on a disk, or --offload-train-target cpu"
        )


def scratch_folder() -> Path:
    """Where the default of --offload-train-disk-dir is."""
    return Path(os.environ.get("SCRATCH") or "/scratch")


def _file_system(folder: Path) -> str | None:
    """Type of the file system that holds a folder or would hold it; None where the system has no list of mounts."""
    if not MOUNTS.exists():
        return None
    kinds = {Path(mount): kind for _, mount, kind, *_ in map(str.split, MOUNTS.read_text().splitlines())}
    folder = folder.resolve()
    return next((kinds[parent] for parent in (folder, *folder.parents) if parent in kinds), None)


def _checks(v: Values) -> Iterator[str]:
    if v.check_residency and not v.offload_train:
        yield "--check-residency has no effect without --offload-train: nothing sleeps; add or drop it"


OFFLOAD_RULES = [_planned_moves, _moving_for_nobody, _levels, _master_weights, _streaming, _disk, _checks]


def offload_warnings(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    levels = v.offload_rollout_level
    if levels != ["kv_cache", "weight"] and not v.offload_rollout and v.needs_engines and v.needs_trainer:
        yield f"--offload-rollout-level {' '.join(levels)} has no effect without --offload-rollout".replace("  ", " ")
