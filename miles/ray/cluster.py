"""Connects the driver to Ray: to the cluster it runs in, or to a new one on this machine."""

import contextlib
import os
import socket
from collections.abc import Iterator

import ray
from ray._private.services import canonicalize_bootstrap_address

from miles.config import RunConfig
from miles.utils.errors import UserError

ANSWER_TIMEOUT_S = 5.0  # for a cluster's head; Ray itself would try for minutes


@contextlib.contextmanager
def session(config: RunConfig) -> Iterator[None]:
    """Ray for the length of a run; its actors, and the servers that end with them, are gone afterwards.

    Joins the cluster named by RAY_ADDRESS (a job submitted to a cluster has it), else starts Ray on this machine. A
    machine without GPUs gets one logical CPU for each bundle of the layout, so that a two-core laptop can hold four
    trainer ranks: the operating system shares the cores.

    Raises:
        UserError: RAY_ADDRESS names no cluster that can be joined.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        num_cpus = max(os.cpu_count(), num_bundles(config)) if config.device == "cpu" else None
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False)
    else:
        _join(address)
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    if "://" in address:
        raise UserError(
            f"RAY_ADDRESS={address}: a run joins its cluster from a machine of it, by the address of the head, as "
            "HOST:6379, or by auto; from outside submit it as a job: ray job submit --address http://HOST:8265 -- "
            "python train.py ..."
        )
    ways_out = "start one with `ray start --head`, correct the address, or unset it to run on this machine alone"
    try:
        head = canonicalize_bootstrap_address(address)  # asks this machine for what `auto` means
    except (ConnectionError, ValueError) as error:
        raise UserError(f"RAY_ADDRESS={address} names no Ray cluster: {error}; {ways_out}") from error
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S).close()
    except OSError as error:
        raise UserError(f"RAY_ADDRESS={address}: no Ray cluster answers at {head} ({error}): {ways_out}") from error
    try:
        ray.init()
    except (ConnectionError, RuntimeError) as error:  # other versions of Ray or Python; no machine of the cluster
        raise UserError(
            f"RAY_ADDRESS={address}: the cluster can't be joined from this machine and this environment: {error}"
        ) from error


def num_bundles(config: RunConfig) -> int:
    """Bundles of the layout: where colocated, the engines use the trainer's first, else each side has its own."""
    trainer = config.world_size if config.needs_trainer else 0
    rollout = config.reserved_rollout_gpus
    return max(trainer, rollout) if config.colocate else trainer + rollout
