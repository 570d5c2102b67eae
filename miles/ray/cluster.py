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
# What a client of HTTP/2, and so of gRPC, says first (RFC 9113, 3.4): a preface and a frame of no settings. The answer
# is a frame of settings too.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS = 4  # the type of a frame, in its fourth byte


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
        num_cpus = max(os.cpu_count() or 1, num_bundles(config)) if config.device == "cpu" else None
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
    try:
        is_head = speaks_grpc(head)
    except OSError as error:
        raise UserError(f"RAY_ADDRESS={address}: no Ray cluster answers at {head} ({error}): {ways_out}") from error
    if not is_head:
        raise UserError(
            f"RAY_ADDRESS={address}: what answers at {head} is no head of a Ray cluster (its port is 6379 unless given "
            f"otherwise; 8265 is the dashboard's): {ways_out}"
        )
    try:
        ray.init()
    except (ConnectionError, RuntimeError) as error:  # other versions of Ray or Python; no machine of the cluster
        raise UserError(
            f"RAY_ADDRESS={address}: the cluster can't be joined from this machine and this environment: {error}"
        ) from error


def speaks_grpc(address: str) -> bool:
    """Whether a gRPC server answers at `HOST:PORT`; with RAY_USE_TLS, whether anything does. OSError: nothing does."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S) as server:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return True
        server.sendall(HELLO)
        return server.recv(len(HELLO))[3:4] == bytes([SETTINGS])


def num_bundles(config: RunConfig) -> int:
    """Bundles of the layout: where colocated, the engines use the trainer's first, else each side has its own."""
    trainer = config.world_size if config.needs_trainer else 0
    rollout = config.reserved_rollout_gpus
    return max(trainer, rollout) if config.colocate else trainer + rollout
