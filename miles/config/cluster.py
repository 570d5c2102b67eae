"""Machines: how many GPUs train, how many generate, and whether they are the same ones."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from miles.config.section import Derived, Section, derives
from miles.config.values import Values


class ClusterConfig(Section):
    title: ClassVar[str] = "Cluster"

    device: Literal["cuda", "cpu"] = Field(
        "cuda", description="Where trainer and engines compute. On cpu, a GPU in the names below is one CPU bundle."
    )
    actor_num_nodes: int = Field(1, gt=0, description="Nodes of the trainer.")
    actor_num_gpus_per_node: int = Field(
        8, gt=0, description="Trainer ranks on each of its nodes; the world size is nodes times this."
    )
    rollout_num_gpus: int | None = Field(
        None,
        ge=0,
        description="GPUs of all engines together. Needed unless --colocate, which takes the trainer's; 0 where no "
        "engine runs. Above the trainer's with --colocate: the first engines share its GPUs, others have their own.",
    )
    rollout_num_gpus_per_engine: int = Field(
        1,
        gt=0,
        description="GPUs of one SGLang engine: its tensor-parallel size (times --sglang-pp-size). An engine lives on "
        "one node.",
    )
    num_gpus_per_node: int = Field(8, gt=0, description="GPUs that a node of the cluster has at most.")
    colocate: bool = Field(
        False,
        description="Trainer and engines share the same GPUs and take turns. Turns both offloads on where they are not "
        "negated (--no-offload).",
    )
    rollout_external: bool | None = Field(
        None,
        description="Generate on engines that run already: Miles checks them, sends them weights, and neither starts "
        "nor ends them. Unset: on with --rollout-external-engine-addrs.",
    )
    rollout_external_engine_addrs: list[str] | None = Field(
        None,
        description="host:port of each engine of --rollout-external. Each has --rollout-num-gpus-per-engine GPUs.",
    )
    distributed_timeout_minutes: int = Field(
        10, gt=0, description="Minutes after which a stuck collective operation of the trainer fails."
    )
    debug_train_only: bool = Field(
        False, description="Start no engine: supervised steps, or those of --load-debug-rollout-data."
    )
    debug_rollout_only: bool = Field(False, description="Start no trainer: generate and score only.")


@derives("debug_train_only")
def _no_engine(v: Values) -> Iterator[Derived]:
    """So that --load-debug-rollout-data can be added to the command line of the run that saved them."""
    if v.load_debug_rollout_data is not None and not v.debug_train_only:
        yield "debug_train_only", True, "--load-debug-rollout-data: no engine runs"


@derives("rollout_external")
def _external_engines(v: Values) -> Iterator[Derived]:
    if v.rollout_external is None:
        addresses = v.rollout_external_engine_addrs
        yield "rollout_external", bool(addresses), "--rollout-external-engine-addrs" if addresses else "none is named"


@derives("rollout_num_gpus")
def _rollout_gpus(v: Values) -> Iterator[Derived]:
    if not v.needs_engines:
        if v.rollout_num_gpus != 0:
            yield "rollout_num_gpus", 0, v.lone_side
    elif v.rollout_external and v.rollout_external_engine_addrs and v.rollout_num_gpus is None:
        size = v.rollout_num_gpus_per_engine
        count = len(v.rollout_external_engine_addrs)
        yield "rollout_num_gpus", count * size, f"{count} external engines of --rollout-num-gpus-per-engine {size}"
    elif v.colocate and v.rollout_num_gpus is None:
        yield "rollout_num_gpus", v.world_size, "--colocate: the engines use the trainer's GPUs"


@derives("colocate")
def _nobody_to_share_with(v: Values) -> Iterator[Derived]:
    if v.colocate and v.lone_side:
        yield "colocate", False, v.lone_side
