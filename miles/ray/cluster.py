"""Connects the driver to Ray: to the cluster it runs in, or to a new one on this machine."""

import contextlib
import os
from collections.abc import Iterator

import ray

from miles.config import RunConfig


@contextlib.contextmanager
def session(config: RunConfig) -> Iterator[None]:
    """Ray for the length of a run; its actors, and the servers that end with them, are gone afterwards.

    Joins the cluster named by RAY_ADDRESS (a job submitted to a cluster has it), else starts Ray on this machine. A
    machine without GPUs gets one logical CPU for each bundle of the layout, so that a two-core laptop can hold four
    trainer ranks: the operating system shares the cores.
    """
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
    else:
        num_cpus = max(os.cpu_count(), num_bundles(config)) if config.device == "cpu" else None
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()


def num_bundles(config: RunConfig) -> int:
    """Bundles of the layout: where colocated, the engines use the trainer's first, else each side has its own."""
    trainer = config.world_size if config.needs_trainer else 0
    rollout = config.reserved_rollout_gpus
    return max(trainer, rollout) if config.colocate else trainer + rollout
