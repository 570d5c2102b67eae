"""Offload: whether a side leaves the GPU while the other one computes, what of it leaves, and where it waits."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.effect import NotWith, OnlyWith, both_run, trainer_runs
from miles.config.names import flag_of
from miles.config.paths import NodePath
from miles.config.residency import policy_of
from miles.config.section import Derived, Section, derives, rule
from miles.config.values import Values
from miles.residency.filesystem import IN_MEMORY, filesystem_of

_USES_DISK = "--offload-train-target disk or --stream-optimizer-state-to-disk"


class OffloadConfig(Section):
    title: ClassVar[str] = "Offload"

    offload: bool | None = Field(
        None, description="Short for --offload-train --offload-rollout; each of these, where given, wins over it."
    )
    offload_train: bool | None = Field(
        None,
        description="The trainer's memory leaves the GPU while engines generate. Unset: on with --colocate. Where both "
        "sides fit side by side, --no-offload-train --no-offload-rollout is faster: nothing has to move.",
    )
    offload_rollout: bool | None = Field(
        None,
        description="The engines' memory leaves the GPU while the trainer computes: their CUDA graphs and what "
        "--offload-rollout-level names. Unset: on with --colocate.",
    )
    offload_rollout_level: Annotated[
        list[Literal["kv_cache", "weight"]], OnlyWith("--offload-rollout", where=both_run, warns=True)
    ] = Field(
        ["kv_cache", "weight"],
        description="Engine memory that leaves besides the CUDA graphs, which always do. What is not named stays on "
        "the GPU in every phase; no value at all: the graphs alone leave.",
    )
    offload_train_target: Literal["cpu", "disk"] = Field(
        "cpu", description="Where the sleeping trainer waits: in pinned host memory, or in files on the node's disk."
    )
    offload_train_disk_dir: Annotated[NodePath | None, OnlyWith(_USES_DISK, where=both_run)] = Field(
        None,
        description="Folder on a disk of each node for --offload-train-target disk and "
        "--stream-optimizer-state-to-disk. The files in it have no names, so that runs and ranks can share it, and are "
        "gone with their process. Unset: miles_train_offload_UID in $SCRATCH, else in /scratch.",
    )
    offload_train_disk_chunk_mb: Annotated[int, OnlyWith(_USES_DISK, where=both_run, warns=True)] = Field(
        256,
        gt=0,
        description="MiB of pinned host memory on each rank through which bytes go to the disk and back; twice as many "
        "with both --offload-train-target disk and --stream-optimizer-state-to-disk.",
    )
    stream_optimizer_state_to_disk: bool = Field(
        False,
        description="Keep master weights and moments on disk during the step too, and read and write them bucket by "
        "bucket: for when they fit neither the GPU nor the host. Slower steps, shorter sleeps. Combines with either "
        "target. Loading a checkpoint with its optimizer takes all of it on the GPU for a moment (--no-load-optim "
        "leaves it out), saving one takes it on the host (--no-save-optim).",
    )
    stream_optimizer_state_moment_dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "fp8e4m3", "fp8e5m2"],
        OnlyWith("--stream-optimizer-state-to-disk", where=trainer_runs),
    ] = Field(
        "fp32", description="Number format of the streamed moments on disk; Adam computes with fp32 all the same."
    )
    rematerialize_param_from_master_weight: bool = Field(
        False,
        description="A sleeping trainer drops its bf16 weights and rebuilds them from the fp32 master weights: 2 bytes "
        "a parameter less to move, and to hold on the host.",
    )
    colocate_memory_peak_device: Literal["cpu", "gpu"] = Field(
        "cpu",
        description="cpu: each side leaves the GPU before the other comes. gpu: the other side's weights come first, "
        "so that the GPU holds both for a moment.",
    )
    train_memory_margin_bytes: Annotated[int, OnlyWith("--offload-train", where=both_run, warns=True)] = Field(
        1024**3,
        ge=0,
        description="Bytes of the GPU that must be free beyond what the trainer takes back when it wakes: room for its "
        "activations. It waits for the engines to let go of them, and stops the run where they don't.",
    )
    offload_train_keep_host_buffers: Annotated[
        bool | None,
        NotWith("--offload-train-target disk", "which keeps no copy on the host", where=both_run, warns=True),
    ] = Field(
        None,
        description="Keep the sleeping trainer's pinned host memory while it is awake, for the next sleep: pinning "
        "anew takes five to ten times as long as the copy. Unset: on, but off with --colocate-memory-peak-device gpu "
        "beside --sglang-enable-weights-cpu-backup, whose mirror needs the room.",
    )
    check_residency: Annotated[bool, OnlyWith("--offload-train", "since nothing sleeps")] = Field(
        False,
        description="Hash every tensor of the trainer before each sleep and after each wake, and stop where they "
        "differ. For finding faults: slow.",
    )


@derives("offload_train", "offload_rollout")
def _offload(v: Values) -> Iterator[Derived]:
    for name in ("offload_train", "offload_rollout"):
        given = getattr(v, name)
        if v.lone_side:
            if given is not False:
                yield name, False, v.lone_side
        elif given is None:
            if v.offload is not None:
                yield name, v.offload, "--offload" if v.offload else "--no-offload"
            elif v.colocate:
                yield name, True, "--colocate"
            else:
                yield name, False, "neither --colocate nor --offload is given"


@derives(
    "offload_train_target",
    "rematerialize_param_from_master_weight",
    "colocate_memory_peak_device",
    "check_residency",
    "stream_optimizer_state_to_disk",
)
def _nothing_to_hand_over(v: Values) -> Iterator[Derived]:
    """So that a debug mode can be added to any command line."""
    if v.lone_side:
        for name, value in (
            ("offload_train_target", "cpu"),
            ("rematerialize_param_from_master_weight", False),
            ("colocate_memory_peak_device", "cpu"),
            ("check_residency", False),
        ):
            if getattr(v, name) != value:
                yield name, value, v.lone_side
        if v.stream_optimizer_state_to_disk and not v.needs_trainer:
            yield "stream_optimizer_state_to_disk", False, v.lone_side


def scratch_folder() -> Path:
    """Where the default of --offload-train-disk-dir is."""
    return Path(os.environ.get("SCRATCH") or "/scratch")


@derives("offload_train_disk_dir")
def _disk_folder(v: Values) -> Iterator[Derived]:
    if v.offload_train_disk_dir is None and v.trainer_uses_disk and scratch_folder().is_dir():
        folder = scratch_folder() / f"miles_train_offload_{os.getuid()}"
        yield "offload_train_disk_dir", str(folder), "$SCRATCH" if os.environ.get("SCRATCH") else "$SCRATCH is not set"


@derives("offload_train_keep_host_buffers")
def _host_buffers(v: Values) -> Iterator[Derived]:
    # The disk has no such buffers: what is not None then was given.
    if v.offload_train_keep_host_buffers is None and v.offload_train_target == "cpu":
        # An engine keeps a copy of itself on the host only if it is told to.
        mirror = bool(v.sglang.get("enable_weights_cpu_backup"))
        if v.colocate_memory_peak_device == "gpu" and mirror:
            yield "offload_train_keep_host_buffers", False, "--sglang-enable-weights-cpu-backup"
        else:
            yield "offload_train_keep_host_buffers", True, "the host has room for them"


@rule
def _planned_moves(v: Values) -> Iterator[str]:
    yield from policy_of(v).problems()


@rule
def _moving_for_nobody(v: Values) -> Iterator[str]:
    asked = [flag_of(name) for name in ("offload_train", "offload_rollout") if getattr(v, name)]
    if asked and not v.colocate:
        yield (
            f"{' and '.join(asked)} without --colocate: memory moves between trainer and engines on the same GPUs, and "
            "here each side has its own; add --colocate, or drop the offload"
        )


@rule
def _levels(v: Values) -> Iterator[str]:
    levels = v.offload_rollout_level
    for level in sorted({level for level in levels if levels.count(level) > 1}):
        yield f"--offload-rollout-level names {level} more than once; name it once"


@rule
def _master_weights(v: Values) -> Iterator[str]:
    if not v.rematerialize_param_from_master_weight:
        return
    if not v.bf16:
        yield (
            "--rematerialize-param-from-master-weight needs --bf16: in fp32 the weights are their own masters; drop one"
        )
    if v.moe_router_freeze_gate:
        yield (
            "--rematerialize-param-from-master-weight rebuilds weights from the optimizer's, which has none of routers "
            "that are frozen (--moe-router-freeze-gate); drop one of the two"
        )
    if not v.use_distributed_optimizer:
        yield (
            "--rematerialize-param-from-master-weight needs --use-distributed-optimizer, whose masters it rebuilds the "
            "weights from; drop --no-use-distributed-optimizer"
        )


@rule
def _streaming(v: Values) -> Iterator[str]:
    if not v.stream_optimizer_state_to_disk:
        return
    if not v.use_distributed_optimizer:
        yield (
            "--stream-optimizer-state-to-disk needs --use-distributed-optimizer, whose buckets it streams; drop "
            "--no-use-distributed-optimizer"
        )
    if v.expert_model_parallel_size > 1:
        yield (
            "--stream-optimizer-state-to-disk streams one optimizer, and experts that are shared out have one of their "
            f"own (--expert-model-parallel-size {v.expert_model_parallel_size}); drop one of the two"
        )


@rule
def _disk(v: Values) -> Iterator[str]:
    folder = v.offload_train_disk_dir
    if not v.trainer_uses_disk:
        return
    if folder is None:
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
