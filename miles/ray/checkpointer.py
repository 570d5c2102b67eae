"""When a run is saved, and where it starts again."""

from pathlib import Path

from miles.config import RunConfig
from miles.ray.handover import Handover
from miles.ray.lazy_actor import ActorClient
from miles.ray.train.group import TrainGroup
from miles.utils.checkpoint_folder import checkpoint_folder, find_checkpoint, write_marker


class Checkpointer:
    """Saves trainer and data position every --save-interval rollouts and after the last, exports --save-hf with them.

    Args:
        config: the run's configuration, with num_rollout set.
        rollout: client of the RolloutManager.
        trainer: the trainer's ranks.
        handover: knows whether what is saved is where it can be read.
    """

    def __init__(self, config: RunConfig, rollout: ActorClient, trainer: TrainGroup, handover: Handover):
        self.config = config
        self.rollout = rollout
        self.trainer = trainer
        self.handover = handover

    async def resume(self) -> int:
        """The first rollout of this run. With --load, the data continues where that checkpoint left it."""
        if not self.config.needs_trainer:
            return self.config.start_rollout_id or 0
        start = await self.trainer.start_rollout_id()
        found = find_checkpoint(self.config.load, self.config.ckpt_step) if self.config.load else None
        if found is not None:
            await self.rollout.load(found[1])
        return start

    async def save_if_due(self, rollout_id: int) -> None:
        """Save after `rollout_id` if it is due. The marker is written last: a checkpoint it names is whole."""
        interval, last = self.config.save_interval, rollout_id + 1 == self.config.num_rollout
        if not last and (interval is None or (rollout_id + 1) % interval):
            return
        self.handover.before_save()
        if self.config.save is not None:
            root = Path(self.config.save).absolute()
            await self.trainer.save(rollout_id)
            await self.rollout.save(checkpoint_folder(root, rollout_id))
            write_marker(root, rollout_id)
        if self.config.save_hf is not None:
            await self.trainer.export_hf(rollout_id)
