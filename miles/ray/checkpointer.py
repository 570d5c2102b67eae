"""When a run is saved, and what goes on where it was."""

from miles.config import RunConfig
from miles.ray.handover import Handover
from miles.ray.lazy_actor import ActorClient
from miles.ray.train.group import CriticGroup, TrainGroup
from miles.utils.checkpoint_folder import finish_checkpoint, locate, partial_folder
from miles.utils.disk import writing


class Checkpointer:
    """Saves models, data position and unfinished samples every --save-interval rollouts and after the last one.

    --save-hf is exported with them.

    Args:
        config: the run's configuration, `resumed` and with num_rollout set.
        rollout: client of the RolloutManager.
        actor, critic: the ranks of what is trained; None without a critic.
        handover: knows whether what is saved is where it can be read, and counts the versions of the weights.
    """

    def __init__(
        self,
        config: RunConfig,
        rollout: ActorClient,
        actor: TrainGroup,
        critic: CriticGroup | None,
        handover: Handover,
    ):
        self.config = config
        self.rollout = rollout
        self.actor = actor
        self.critic = critic
        self.handover = handover

    async def resume(self) -> None:
        """With --load, prompts and samples go on where that checkpoint left them.

        A run that only evaluates takes none: its prompts need not be those of the checkpoint.
        """
        if self.config.load is not None and self.config.num_rollout > 0:
            folder = locate(self.config.load, self.config.ckpt_step)
            self.handover.version = await self.rollout.load(folder)

    def is_due(self, rollout_id: int) -> bool:
        """Whether anything is saved after `rollout_id`."""
        if self.config.save is None and self.config.save_hf is None:
            return False
        interval, last = self.config.save_interval, rollout_id + 1 == self.config.num_rollout
        return last or (interval is not None and (rollout_id + 1) % interval == 0)

    async def save_critic_if_due(self, rollout_id: int) -> None:
        """Save the critic, which is on the GPUs. It counts once `save_if_due` has saved the rest."""
        if self.config.save is not None and self.is_due(rollout_id):
            self.handover.before_critic_save()
            await self.critic.save(rollout_id)

    async def save_if_due(self, rollout_id: int) -> None:
        """Save the rest after `rollout_id` if it is due. It counts once all of it is there."""
        if not self.is_due(rollout_id):
            return
        self.handover.before_save()
        if self.config.save is not None:
            root = self.config.save
            await self.actor.save(rollout_id)
            await self.rollout.save(partial_folder(root, rollout_id), rollout_id, self.handover.version)
            with writing("--save", root):
                critic = None if self.critic is None else self.config.critic_save
                finish_checkpoint(root, rollout_id, critic)
        if self.config.save_hf is not None:
            await self.actor.export_hf(rollout_id)
