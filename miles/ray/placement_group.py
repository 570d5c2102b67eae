"""Who sits where: reserves one bundle a GPU (on a CPU: one CPU), and places trainer ranks and engines on them.

| layout | bundles | trainer | engines |
| --- | --- | --- | --- |
| colocated | the trainer's | from 0 | from 0: both share a bundle |
| colocated, more rollout GPUs | those of rollout | from 0 | from 0: the first ones share a bundle |
| split | trainer + rollout | from 0 | behind the trainer |
| train only, rollout only | that side | from 0 | from 0 |
| external engines | the trainer's | from 0 | none: they are elsewhere |

An engine with bundles of its own gets them on one node, from the last node on; the trainer has what is left. Each rank
of a critic shares the bundle of the actor's.
"""

import logging
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from miles.backends.sglang_utils.arguments import HOST
from miles.backends.sglang_utils.engine import SGLangEngine
from miles.backends.sglang_utils.external import ExternalEngine
from miles.backends.sglang_utils.router import ExternalRouter, SGLangRouter
from miles.config import RunConfig
from miles.ray.cluster import num_bundles
from miles.ray.lazy_actor import ActorClient
from miles.ray.rollout.client import RolloutClient
from miles.ray.train.group import CriticGroup, TrainGroup
from miles.ray.train.models import TrainingModels
from miles.utils.errors import UserError
from miles.utils.network import port_slices

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0
# Shares of a bundle; a rank of the actor, one of the critic and an engine fit in one together.
TRAINER_SHARE = 0.4
ENGINE_SHARE = 0.2
# Ports of each engine, so that two which start together on a node cannot pick the same ones.
PORTS_OF_AN_ENGINE = 100


@dataclass(frozen=True)
class Bundle:
    """One reserved device: its index in the placement group, its node, and its GPU id there (None on a CPU)."""

    index: int
    node_ip: str
    gpu_id: int | None


@dataclass(frozen=True)
class Placement:
    """The reserved bundles in rank order: one of each trainer rank, and those of each engine."""

    group: PlacementGroup
    trainer: tuple[Bundle, ...]
    engines: tuple[tuple[Bundle, ...], ...]

    def options(self, bundle: Bundle, share: float) -> dict:
        """Ray options that put an actor on `bundle` and take `share` of its device."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle.index)
        resources = {"num_cpus": share, "num_gpus": 0 if bundle.gpu_id is None else share}
        return {"scheduling_strategy": strategy, **resources}

    def remove(self) -> None:
        """Give the bundles back."""
        remove_placement_group(self.group)


class _Probe:
    """Says where a bundle landed."""

    def locate(self) -> tuple[str, int | None]:
        ids = ray.get_gpu_ids()
        return ray.util.get_node_ip_address(), int(ids[0]) if ids else None


def create_placement_groups(config: RunConfig) -> Placement:
    """Reserve the bundles of the configured layout.

    Raises:
        ValueError: the cluster has too few devices; the message says how many it has and how many are asked for.
    """
    resource = "GPU" if config.device == "cuda" else "CPU"
    needed = num_bundles(config)
    total = int(ray.cluster_resources().get(resource, 0))
    if total < needed:
        hint = "; without GPUs, run with --device cpu" if resource == "GPU" and total == 0 else ""
        raise UserError(
            f"the layout needs {needed} {resource}s ({_explain(config)}), the Ray cluster has {total}: "
            f"lower --actor-num-gpus-per-node or --rollout-num-gpus, or add machines{hint}"
        )
    bundle = {"CPU": 1, "GPU": 1} if resource == "GPU" else {"CPU": 1}
    group = placement_group([bundle] * needed, strategy="PACK")
    if not group.wait(PLACEMENT_TIMEOUT_S):
        free = ray.available_resources()
        remove_placement_group(group)
        raise UserError(
            f"{needed} bundles of {bundle} could not be reserved within {PLACEMENT_TIMEOUT_S:.0f} s: free now are "
            f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs; another job may hold the rest"
        )
    bundles = _sorted_bundles(group, needed, on_gpu=resource == "GPU")
    trainer, engines = assign(config, bundles)
    where = "; ".join(map(_places, engines)) or ("their own machines" if config.rollout_external else "nothing")
    logger.info("trainer on %s; engines on %s", _places(trainer), where)
    return Placement(group, trainer, engines)


def assign(config: RunConfig, bundles: tuple[Bundle, ...]) -> tuple[tuple[Bundle, ...], tuple[tuple[Bundle, ...], ...]]:
    """The bundles of the trainer's ranks and of each engine, from all `bundles` in order of node and GPU id.

    Raises:
        ValueError: an engine would span nodes.
    """
    size = config.rollout_num_gpus_per_engine
    shared = config.num_colocated_engines
    num_alone = config.reserved_rollout_gpus // size - shared
    by_node: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        by_node.setdefault(bundle.node_ip, []).append(bundle)
    # Colocated engines need a node's bundles in whole engines from its first on: the others take a node's last ones.
    alone: list[tuple[Bundle, ...]] = []
    for free in reversed(by_node.values()):
        while len(alone) < num_alone and len(free) >= size:
            alone.insert(0, tuple(free[-size:]))
            del free[-size:]
    trainer = tuple(bundle for free in by_node.values() for bundle in free)
    engines = [trainer[rank * size : (rank + 1) * size] for rank in range(shared)] + alone
    if len(alone) < num_alone or any(len({bundle.node_ip for bundle in engine}) > 1 for engine in engines):
        counts = ", ".join(f"{sum(b.node_ip == ip for b in bundles)} on {ip}" for ip in by_node)
        raise UserError(
            f"an engine would span nodes: each needs {size} GPUs of one node (--rollout-num-gpus-per-engine), and the "
            f"reserved ones are {counts}; choose a size that fits"
        )
    return trainer, tuple(engines)


def _places(bundles: tuple[Bundle, ...]) -> str:
    names = [f"{b.node_ip} bundle {b.index}" + ("" if b.gpu_id is None else f" GPU {b.gpu_id}") for b in bundles]
    return ", ".join(names) or "nothing"


def _explain(config: RunConfig) -> str:
    sides = []
    if config.needs_trainer:
        sides.append(f"trainer {config.actor_num_nodes} x {config.actor_num_gpus_per_node}")
    if config.reserved_rollout_gpus:
        sides.append(f"rollout {config.reserved_rollout_gpus}")
    return (" shared with " if config.colocate else " + ").join(sides)


def _sorted_bundles(group: PlacementGroup, count: int, on_gpu: bool) -> tuple[Bundle, ...]:
    probes = [
        ray.remote(_Probe)
        .options(
            num_cpus=TRAINER_SHARE,
            num_gpus=TRAINER_SHARE if on_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
        for index in range(count)
    ]
    places = ray.get([probe.locate.remote() for probe in probes])
    for probe in probes:
        ray.kill(probe)
    bundles = [Bundle(index, node_ip, gpu_id) for index, (node_ip, gpu_id) in enumerate(places)]
    return tuple(sorted(bundles, key=_rank_order))


def _rank_order(bundle: Bundle) -> tuple:
    return _numeric(bundle.node_ip), -1 if bundle.gpu_id is None else bundle.gpu_id, bundle.index


def _numeric(node_ip: str) -> tuple:
    """Addresses in numeric order: 10.0.0.9 before 10.0.0.10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in node_ip.replace(":", ".").split("."))


async def create_rollout_manager(config: RunConfig, placement: Placement) -> RolloutClient:
    """Read the data, then start the engines; returns a client of the RolloutManager, ready to generate.

    The data is read first, so that a bad row stops the run before a server starts.
    """
    manager: Any = ActorClient(
        "miles.ray.rollout.rollout_manager.RolloutManager",
        config,
        _engines(config, placement),
        _router(config),
        options={"num_cpus": 0, "max_concurrency": 1000},
        concurrent=True,
    )
    await manager.start()
    return manager


def _engines(config: RunConfig, placement: Placement) -> list[ActorHandle]:
    """One actor an engine, which starts the engine when it is told to."""
    if config.needs_engines and config.rollout_external:
        actor = ray.remote(ExternalEngine).options(num_cpus=0)
        return [actor.remote(config, address) for address in config.rollout_external_engine_addrs or ()]
    engines = []
    slices = port_slices(len(placement.engines), PORTS_OF_AN_ENGINE)
    for rank, (bundles, ports) in enumerate(zip(placement.engines, slices, strict=True)):
        engine = ray.remote(SGLangEngine).options(**placement.options(bundles[0], ENGINE_SHARE))
        gpu_ids = [bundle.gpu_id for bundle in bundles if bundle.gpu_id is not None]
        engines.append(engine.remote(config, rank, gpu_ids, _address(config, bundles[0].node_ip), ports))
    return engines


def _router(config: RunConfig) -> ActorHandle | None:
    """The actor of the router, if there is one."""
    if config.needs_engines and config.sglang_router_ip is not None:
        return ray.remote(ExternalRouter).options(num_cpus=0).remote(config)
    if config.needs_engines and config.sglang_router_policy is not None:
        # On the driver's node, whose address is known.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(SGLangRouter).options(num_cpus=0, scheduling_strategy=here)
        return actor.remote(config, _address(config, ray.util.get_node_ip_address()))
    return None


def _address(config: RunConfig, node_ip: str) -> str:
    """Where a server of that node listens: for the node alone, if nobody elsewhere talks to it."""
    one_node = sum(node["Alive"] for node in ray.nodes()) == 1
    return HOST if one_node and config.sglang_router_ip in (None, HOST) else node_ip


def create_training_models(config: RunConfig, placement: Placement) -> TrainingModels:
    """Start the processes of what is trained, rank by rank on its bundles; they build nothing yet.

    Without trainer bundles (--debug-rollout-only) the actor has no ranks.
    """
    options = [placement.options(bundle, TRAINER_SHARE) for bundle in placement.trainer]
    nodes = [bundle.node_ip for bundle in placement.trainer]
    critic = CriticGroup(config, options, nodes) if config.use_critic else None
    return TrainingModels(TrainGroup(config, options, nodes), critic)
