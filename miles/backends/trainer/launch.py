"""What the driver must know of a trainer's backend to start its ranks; imports neither torch nor the backend."""

from collections.abc import Callable
from dataclasses import dataclass

from miles.config import RunConfig


@dataclass(frozen=True)
class Launch:
    """How a backend's ranks are started and which data each of them gets.

    Args:
        actor, critic: the classes of a rank ("package.module.Class"), built with (config, rank, world size).
        environment: the environment variables of a rank's process, set before torch is imported.
        shard_of_rank: from (config, rank) to the number of the data-parallel shard that the rank trains on.
    """

    actor: str
    critic: str
    environment: Callable[[RunConfig], dict[str, str]]
    shard_of_rank: Callable[[RunConfig, int], int]
