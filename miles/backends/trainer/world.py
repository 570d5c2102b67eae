"""The world of a trainer's ranks: torch.distributed, before any backend's groups."""

import datetime

import torch
import torch.distributed as dist

from miles.config import RunConfig


def join_world(config: RunConfig, rank: int, world_size: int, master: str) -> None:
    """Meet the other ranks at `master` ("host:port"): over NCCL on a GPU, over gloo on a CPU."""
    if config.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend="nccl" if config.device == "cuda" else "gloo",
        init_method=f"tcp://{master}",
        rank=rank,
        world_size=world_size,
        timeout=timeout(config),
    )


def timeout(config: RunConfig) -> datetime.timedelta:
    """After this a collective operation fails; groups don't inherit it from the world."""
    return datetime.timedelta(minutes=config.distributed_timeout_minutes)
