"""Machines: how many GPUs train, how many generate, and whether they are the same ones."""

from typing import ClassVar, Literal

from pydantic import Field

from miles.config.section import Section


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
