"""What a configuration must satisfy for memory to move: the planner's own conditions, and those of the flags."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.config.names import flag_of
from miles.config.offload import OffloadConfig, scratch_folder
from miles.config.values import Values
from miles.residency.filesystem import IN_MEMORY, filesystem_of
from miles.residency.policy import policy_of


def _planned_moves(v: Values) -> Iterator[str]:
    yield from policy_of(v).problems()


def _moving_for_nobody(v: Values) -> Iterator[str]:
    asked = [flag_of(name) for name in ("offload_train", "offload_rollout") if getattr(v, name)]
    if asked and not v.colocate:
        yield (
            f"{' and '.join(asked)} without --colocate: memory moves between trainer and engines on the same GPUs, and "
            "here each side has its own; add --colocate, or drop the offload"
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
    elif v.actor_num_nodes == 1 and (kind := filesystem_of(Path(folder))) in IN_MEMORY:
        # With more nodes the folder need not be the one that is seen here: each rank looks at its own.
        yield (
            f"--offload-train-disk-dir {folder} is in memory ({kind}), so that what goes there stays on the host; "
            "choose a folder on a disk, or --offload-train-target cpu without --stream-optimizer-state-to-disk"
        )


def _checks(v: Values) -> Iterator[str]:
    if v.check_residency and not v.offload_train:
        yield "--check-residency has no effect without --offload-train: nothing sleeps; add or drop it"


def offload_warnings(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    if not (v.needs_engines and v.needs_trainer):
        return  # so that a debug mode can be added to any command line
    levels = v.offload_rollout_level
    if not _is_default("offload_rollout_level", levels) and not v.offload_rollout:
        yield f"--offload-rollout-level {' '.join(levels)} has no effect without --offload-rollout".replace("  ", " ")
    keep, chunk, margin = v.offload_train_keep_host_buffers, v.offload_train_disk_chunk_mb, v.train_memory_margin_bytes
    if v.offload_train_target == "disk" and not _is_default("offload_train_keep_host_buffers", keep):
        flag = "--offload-train-keep-host-buffers" if keep else "--no-offload-train-keep-host-buffers"
        yield f"{flag} has no effect with --offload-train-target disk, which keeps no copy on the host"
    if not _is_default("offload_train_disk_chunk_mb", chunk) and not v.trainer_uses_disk:
        yield (
            f"--offload-train-disk-chunk-mb {chunk} has no effect without --offload-train-target disk or "
            "--stream-optimizer-state-to-disk"
        )
    if not _is_default("train_memory_margin_bytes", margin) and not v.offload_train:
        yield f"--train-memory-margin-bytes {margin} has no effect without --offload-train"


def _is_default(name: str, value: Any) -> bool:
    return value == OffloadConfig.model_fields[name].default


def _streamed_experts(v: Values) -> Iterator[str]:
    if v.stream_optimizer_state_to_disk and v.expert_model_parallel_size > 1:
        yield (
            "--stream-optimizer-state-to-disk streams one optimizer, and experts that are shared out have one of their "
            f"own (--expert-model-parallel-size {v.expert_model_parallel_size}); drop one of the two"
        )


OFFLOAD_RULES = [
    _planned_moves,
    _moving_for_nobody,
    _levels,
    _master_weights,
    _streaming,
    _disk,
    _checks,
    _streamed_experts,
]
