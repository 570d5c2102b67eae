"""What of a run is saved, and what goes on where it was."""

from miles.config import RunConfig
from miles.ray.handover import Handover
from miles.ray.rollout.client import RolloutClient
from miles.ray.train.models import TrainingModels
from miles.utils.checkpoint_folder import finish_checkpoint, locate, partial_folder, remove_checkpoint
from miles.utils.disk import writing


class Checkpointer:
    """Saves models, data position and unfinished samples; --save-hf is exported with them.

    Args:
        config: the run's configuration, `resumed` and with num_rollout set.
        rollout: client of the RolloutManager.
        models: what is trained.
        handover: knows whether what is saved is where it can be read, and counts the versions of the weights.
    """

    def __init__(
        self,
        config: RunConfig,
        rollout: RolloutClient,
        models: TrainingModels,
        handover: Handover,
    ):
        self.config = config
        self.rollout = rollout
        self.models = models
        self.handover = handover
        continued = config.load is not None and config.load == config.save and not config.finetune
        self._ours = [config.ckpt_step] if continued and config.ckpt_step is not None else []

    async def resume(self) -> int:
        """With --load, prompts and samples go on where that checkpoint left them.

        A run that only evaluates takes none, for its prompts need not be those of the checkpoint, nor does one that
        has only its weights (--finetune).

        Returns: the version of the checkpoint's weights; 0 where a run is new.
        """
        if self.config.load is None or self.config.num_rollout == 0 or self.config.finetune:
            return 0
        assert self.config.ckpt_step is not None, "a resumed configuration names the step of its checkpoint"
        return await self.rollout.load(locate(self.config.load, self.config.ckpt_step))

    async def save_critic(self, rollout_id: int) -> None:
        """Save the critic, which is on the GPUs. It counts once `save` has saved the rest."""
        assert self.models.critic is not None, "there is no critic to save"
        if self.config.save is not None:
            self.handover.before_critic_save()
            await self.models.critic.save(rollout_id)

    async def save(self, rollout_id: int) -> None:
        """Save the rest after `rollout_id`. It counts once all of it is there."""
        self.handover.before_save()
        if self.config.save is not None:
            root = self.config.save
            await self.models.actor.save(rollout_id)
            await self.rollout.save(partial_folder(root, rollout_id), rollout_id, self.handover.version)
            with writing("--save", root):
                critic = None if self.models.critic is None else self.config.critic_save
                finish_checkpoint(root, rollout_id, critic)
                self._keep_some(root, rollout_id, critic)
        if self.config.save_hf is not None:
            await self.models.actor.export_hf(rollout_id)

    def _keep_some(self, root: str, newest: int, critic: str | None) -> None:
        """With --save-retain-interval, take away what this run saved before, or went on from, and need not keep."""
        interval = self.config.save_retain_interval
        if interval is None:
            return
        for rollout_id in self._ours:
            if (rollout_id + 1) % interval and rollout_id < newest:
                remove_checkpoint(root, rollout_id, critic)
        self._ours = [newest]
