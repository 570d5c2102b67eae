"""Offload: whether a side leaves the GPU while the other one computes, what of it leaves, and where it waits."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from miles.config.paths import NodePath
from miles.config.section import Derived, Section, derives
from miles.config.values import Values


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
    offload_rollout_level: list[Literal["kv_cache", "weight"]] = Field(
        ["kv_cache", "weight"],
        description="Engine memory that leaves besides the CUDA graphs, which always do. What is not named stays on "
        "the GPU in every phase; no value at all: the graphs alone leave.",
    )
    offload_train_target: Literal["cpu", "disk"] = Field(
        "cpu", description="Where the sleeping trainer waits: in pinned host memory, or in files on the node's disk."
    )
    offload_train_disk_dir: NodePath | None = Field(
        None,
        description="Folder on a disk of each node for --offload-train-target disk and "
        "--stream-optimizer-state-to-disk. The files in it have no names, so that runs and ranks can share it, and are "
        "gone with their process. Unset: miles_train_offload_UID in $SCRATCH, else in /scratch.",
    )
    offload_train_disk_chunk_mb: int = Field(
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
    stream_optimizer_state_moment_dtype: Literal["fp32", "bf16", "fp16", "fp8e4m3", "fp8e5m2"] = Field(
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
        "so that the GPU holds both for a moment, and host buffers are given back at each wake.",
    )
    train_memory_margin_bytes: int = Field(
        1024**3,
        ge=0,
        description="Bytes of the GPU that must be free beyond what the trainer takes back when it wakes: room for its "
        "activations. It waits for the engines to let go of them, and stops the run where they don't.",
    )
    offload_train_keep_host_buffers: bool | None = Field(
        None,
        description="Keep the sleeping trainer's pinned host memory while it is awake, for the next sleep: pinning "
        "anew takes five to ten times as long as the copy. Unset: on, but off with --colocate-memory-peak-device gpu.",
    )
    check_residency: bool = Field(
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
        peak = v.colocate_memory_peak_device
        yield "offload_train_keep_host_buffers", peak == "cpu", f"--colocate-memory-peak-device {peak}"
