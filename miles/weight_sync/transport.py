"""What the ways to an engine have in common."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch

from miles.engines.client import SGLangClient
from miles.weight_sync.background import BackgroundLoop
from miles.weight_sync.plan import Bucket
from miles.weight_sync.target import EngineTarget


@dataclass(frozen=True)
class Link:
    """How this rank talks to engines during one update: clients by engine number, to be used in `loop` only."""

    loop: BackgroundLoop
    clients: dict[int, SGLangClient]


@dataclass(frozen=True)
class TransportSetup:
    """What a transport can know of the trainer, the same for all of them.

    Args:
        rank: this process in the trainer's world.
        stage_sources: the first rank of each pipeline stage.
        device: where the buckets are.
        address: of this rank's machine, as remote engines reach it.
        timeout: of what ranks and engines do together.
        buffer_size: bytes of a bucket.
        checkpoint_folder: where the engines loaded their weights from.
        disk_folder: --update-weight-disk-dir.
    """

    rank: int
    stage_sources: list[int]
    device: torch.device
    address: str
    timeout: timedelta
    buffer_size: int
    checkpoint_folder: str | Path
    disk_folder: str | Path | None


class Transport:
    """Brings buckets into some of the engines. All trainer ranks make the same calls, in the order below.

    `begin` once in an update; for each bucket `prepare`, `wait` for the one that was sent before, `send`; at the end
    `wait` and `end`. If anything fails on any rank, `abandon` on all of them instead of what is left, after which
    `begin` starts afresh. Here they do nothing.

    One is built on every trainer rank, together: it may create process groups.

    Args:
        engines: those that it serves, by number.
        setup: what it can know of the trainer.

    Attributes:
        everywhere: every rank needs every bucket, not only the ranks of its pipeline stage.
        shares_memory: other processes open this rank's buckets.
        touches_at_end: engines take nothing before `end`.
    """

    everywhere: ClassVar[bool]
    touches_at_end: ClassVar[bool] = False
    shares_memory: bool = False

    def __init__(self, engines: dict[int, EngineTarget], setup: TransportSetup):
        self.engines, self.rank = engines, setup.rank

    def begin(self, link: Link) -> None:
        """Get ready. What it raises is told to all ranks; so with `prepare`, `wait` and `end`."""

    def prepare(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Do what this rank can do alone with a filled bucket, while the engines still take the one before."""

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Have the engines take the bucket that was prepared; returns before they have."""

    def wait(self) -> None:
        """Return when the engines have taken the last bucket: its memory may go."""

    def end(self) -> None:
        """Every bucket was sent: return when the engines hold them all."""

    def abandon(self) -> None:
        """Clean up after a failure; never raises."""

    def close(self, link: Link) -> None:
        """After the last update: give up what is kept between updates, here and in the engines."""
