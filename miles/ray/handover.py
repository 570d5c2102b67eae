"""The hand-over between the trainer and the engines: the new weights, in lockstep, with a version each."""

from miles.config import RunConfig
from miles.ray.lazy_actor import ActorClient
from miles.ray.train.group import TrainGroup
from miles.weight_sync.target import EngineTarget


class Handover:
    """Brings the trainer's weights into the engines; does nothing where one side is missing.

    Args:
        config: the run's configuration.
        rollout: client of the RolloutManager.
        trainer: the trainer's ranks.
    """

    def __init__(self, config: RunConfig, rollout: ActorClient, trainer: TrainGroup):
        self.config = config
        self.rollout = rollout
        self.trainer = trainer
        self.active = config.needs_engines and config.needs_trainer
        self.version = 0

    async def initial_sync(self) -> None:
        """Connect both sides and send the first weights: the engines' own, or those of a loaded checkpoint."""
        if self.active:
            urls = await self.rollout.engine_urls()
            await self.trainer.connect([self._target(rank, url) for rank, url in enumerate(urls)])
            await self.to_rollout()

    async def to_rollout(self) -> dict[str, float]:
        """Send the weights as the next version; returns perf/update_weights_* metrics."""
        if not self.active:
            return {}
        self.version += 1
        return await self.trainer.update_weights(self.version)

    def _target(self, engine: int, url: str) -> EngineTarget:
        """A colocated engine reads the memory of the trainer ranks on its bundles, a split one (on a CPU) rank 0's."""
        size = self.config.rollout_num_gpus_per_engine
        bundles = list(range(engine * size, (engine + 1) * size))
        return EngineTarget(url, size, bundles if self.config.colocate else [0] * size)
