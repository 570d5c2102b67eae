"""Machines: how many GPUs train, how many generate, and whether they are the same ones."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from miles.config.effect import NotWith
from miles.config.section import Derived, Section, derives, rule
from miles.config.values import Values
from miles.utils.errors import UserError


def _texts(variables: Any) -> Any:
    """Numbers as texts: `{"NVTE_DEBUG": 1}` is what people write."""
    if not isinstance(variables, dict):
        return variables
    for name in variables:
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
            raise UserError(f"the name of a variable has letters, digits and _ only, not {name!r}")
    return {name: str(value) if type(value) in (int, float) else value for name, value in variables.items()}


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
    rollout_external_engine_addrs: Annotated[list[str] | None, NotWith("--no-rollout-external")] = Field(
        None,
        description="host:port of each engine of --rollout-external. Each has --rollout-num-gpus-per-engine GPUs.",
    )
    distributed_timeout_minutes: int = Field(
        10, gt=0, description="Minutes after which a stuck collective operation of the trainer fails."
    )
    train_env_vars: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(
        default_factory=dict,
        description="Environment variables of the trainer's processes, over those that Miles sets there.",
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
            yield "rollout_num_gpus", 0, f"{v.lone_side}"
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


@rule
def _node_size(v: Values) -> Iterator[str]:
    if v.needs_trainer and v.actor_num_gpus_per_node > v.num_gpus_per_node:
        yield (
            f"--actor-num-gpus-per-node {v.actor_num_gpus_per_node} does not fit on a node of --num-gpus-per-node "
            f"{v.num_gpus_per_node}; lower the first or correct the second"
        )


@rule
def _engine_gpus(v: Values) -> Iterator[str]:
    if not v.needs_engines or v.rollout_external:
        return
    total, size = v.rollout_num_gpus, v.rollout_num_gpus_per_engine
    if size > v.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {size} is more than the {v.num_gpus_per_node} GPUs of a node "
            "(--num-gpus-per-node); engines over several nodes are known from Miles, not here: a model that does not "
            "fit on one node can't be served; lower the first or correct the second"
        )
    if not total:
        yield (
            f"--rollout-num-gpus is {total or 'not given'}, but the engines need GPUs of their own; give their number, "
            "or share the trainer's with --colocate"
        )
    elif v.colocate and total < v.world_size:
        yield (
            f"--rollout-num-gpus {total} contradicts --colocate, which gives the engines the trainer's {v.world_size} "
            "GPUs; leave it out, or give more than those: engines beyond them get GPUs of their own"
        )
    elif left := total % size:
        yield (
            f"--rollout-num-gpus {total}{' (the world size)' if v.colocate and total == v.world_size else ''} is no "
            f"multiple of --rollout-num-gpus-per-engine {size}, {left} would be left over; choose a divisor"
        )
    elif v.colocate and v.world_size % size:
        yield (
            f"--rollout-num-gpus-per-engine {size} does not divide the trainer's {v.world_size} GPUs: with --colocate "
            f"and --rollout-num-gpus {total}, an engine would share only some of its GPUs with it; choose a divisor"
        )


@rule
def _addresses(v: Values) -> Iterator[str]:
    addresses = v.rollout_external_engine_addrs
    if v.rollout_external and not addresses:
        yield "--rollout-external needs --rollout-external-engine-addrs, the host:port of each engine"
    if not (v.rollout_external and addresses and v.needs_engines):
        return
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
            yield f"--rollout-external-engine-addrs {address} must be host:port, such as 10.0.0.7:30000"
    for address in sorted({address for address in addresses if addresses.count(address) > 1}):
        yield f"--rollout-external-engine-addrs names {address} more than once; name each engine once"
    if v.colocate:
        yield (
            "--rollout-external with --colocate: whoever runs the engines chose their GPUs, and Miles cannot take "
            "turns with them there; drop one"
        )
    if v.rollout_num_gpus != len(addresses) * v.rollout_num_gpus_per_engine:
        yield (
            f"--rollout-num-gpus {v.rollout_num_gpus} is not {len(addresses)} external engines times "
            f"--rollout-num-gpus-per-engine {v.rollout_num_gpus_per_engine}; leave it out"
        )
    if v.sglang:
        flags = ", ".join(f"--sglang-{name.replace('_', '-')}" for name in v.sglang)
        yield f"{flags} has no effect on engines that run already (--rollout-external): give it to those, drop it here"
