"""What the ways to an engine have in common."""

from dataclasses import dataclass

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


class Transport:
    """Brings buckets into some of the engines. All trainer ranks make the same calls, in the order below.

    `begin` once in an update; for each bucket `prepare`, `send`, `wait`; at the end `end`. If anything fails on any
    rank, `abandon` on all of them instead of what is left, after which `begin` starts afresh. Here they do nothing.

    everywhere: every rank needs every bucket, not only the ranks of its pipeline stage. shares_memory: other processes
    open this rank's buckets. touches_at_end: engines take nothing before `end`. engines: by number.
    """

    everywhere: bool
    shares_memory: bool
    touches_at_end = False
    engines: dict[int, EngineTarget]

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
