"""The ways to engines that share no memory with the trainer. The configuration reads it: nothing here needs torch."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles.weight_sync.transport import Transport


@dataclass(frozen=True)
class RemoteTransport:
    """A way to remote engines.

    Args:
        path: the dotted path of its `Transport`.
        help: what it is, for --update-weight-transfer-mode.
    """

    path: str
    help: str

    def load(self) -> "type[Transport]":
        """Its class."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


# By the name in --update-weight-transfer-mode.
REMOTE_TRANSPORTS = {
    "broadcast": RemoteTransport(
        "miles.weight_sync.broadcast.BroadcastTransport",
        "a process group for each pipeline stage, NCCL between GPUs, gloo on a CPU",
    ),
    "disk": RemoteTransport("miles.weight_sync.disk.DiskTransport", "a checkpoint in --update-weight-disk-dir"),
}
