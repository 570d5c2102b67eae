"""Who sits where: reserves one bundle a GPU (on a CPU: one CPU), and places trainer ranks and engines on them.

| layout | bundles | trainer | engines |
| --- | --- | --- | --- |
| colocated | the trainer's | from 0 | from 0: both share a bundle |
| split | trainer + rollout | from 0 | behind the trainer |
| train only, rollout only | that side | from 0 | from 0 |
"""

import logging
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.backends.sglang_utils.engine import SGLangEngine
from miles.config import RunConfig
from miles.ray.cluster import num_bundles
from miles.ray.lazy_actor import ActorClient
from miles.ray.train.group import TrainGroup

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0
# Shares of a bundle; a trainer rank and an engine fit in one together.
TRAINER_SHARE = 0.4
ENGINE_SHARE = 0.2


@dataclass(frozen=True)
class Bundle:
    """One reserved device: its index in the placement group, its node, and its GPU id there (None on a CPU)."""

    index: int
    node_ip: str
    gpu_id: int | None


@dataclass(frozen=True)
class Placement:
    """The reserved bundles of each side, in rank order: by node, then by numeric GPU id."""

    group: PlacementGroup
    trainer: tuple[Bundle, ...]
    rollout: tuple[Bundle, ...]

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
        raise ValueError(
            f"the layout needs {needed} {resource}s ({_explain(config)}), the Ray cluster has {total}: "
            f"lower --actor-num-gpus-per-node or --rollout-num-gpus, or add machines{hint}"
        )
    bundle = {"CPU": 1, "GPU": 1} if resource == "GPU" else {"CPU": 1}
    group = placement_group([bundle] * needed, strategy="PACK")
    if not group.wait(PLACEMENT_TIMEOUT_S):
        free = ray.available_resources()
        remove_placement_group(group)
        raise ValueError(
            f"{needed} bundles of {bundle} could not be reserved within {PLACEMENT_TIMEOUT_S:.0f} s: free now are "
            f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs; another job may hold the rest"
        )
    bundles = _sorted_bundles(group, needed, on_gpu=resource == "GPU")
    offset = config.world_size if config.needs_trainer and not config.colocate else 0
    rollout = config.rollout_num_gpus if config.needs_engines else 0
    placement = Placement(
        group,
        trainer=bundles[: config.world_size if config.needs_trainer else 0],
        rollout=bundles[offset : offset + rollout],
    )
    logger.info("trainer on %s; engines on %s", _places(placement.trainer), _places(placement.rollout))
    return placement


def _places(bundles: tuple[Bundle, ...]) -> str:
    names = [f"{b.node_ip} bundle {b.index}" + ("" if b.gpu_id is None else f" GPU {b.gpu_id}") for b in bundles]
    return ", ".join(names) or "nothing"


def _explain(config: RunConfig) -> str:
    sides = []
    if config.needs_trainer:
        sides.append(f"trainer {config.actor_num_nodes} x {config.actor_num_gpus_per_node}")
    if config.needs_engines:
        sides.append(f"rollout {config.rollout_num_gpus}")
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


async def create_rollout_manager(config: RunConfig, placement: Placement) -> ActorClient:
    """Read the data, then start the engines; returns a client of the RolloutManager, ready to generate.

    The data is read first, so that a bad row stops the run before a server starts.
    """
    size = config.rollout_num_gpus_per_engine
    engines = []
    for rank in range(len(placement.rollout) // size):
        bundles = placement.rollout[rank * size : (rank + 1) * size]
        if len({bundle.node_ip for bundle in bundles}) > 1:
            raise ValueError(f"engine {rank} would span nodes: {size} GPUs an engine must fit on one node")
        gpu_ids = [bundle.gpu_id for bundle in bundles if bundle.gpu_id is not None]
        engine = ray.remote(SGLangEngine).options(**placement.options(bundles[0], ENGINE_SHARE))
        engines.append(engine.remote(config, rank, gpu_ids))
    manager = ActorClient(
        "miles.ray.rollout.rollout_manager.RolloutManager",
        config,
        engines,
        options={"num_cpus": 0, "max_concurrency": 1000},
        concurrent=True,
    )
    await manager.start()
    return manager


async def create_training_models(config: RunConfig, placement: Placement) -> TrainGroup:
    """Start the trainer's ranks on their bundles and load the model, or the checkpoint of `--load`.

    Without trainer bundles (--debug-rollout-only) the group has no ranks.
    """
    group = TrainGroup(config, [placement.options(bundle, TRAINER_SHARE) for bundle in placement.trainer])
    if placement.trainer:
        await group.init()
    return group
