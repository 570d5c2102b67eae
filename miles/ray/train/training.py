"""Training: the models of a run learn from a rollout, in turns on the same GPUs."""

import ray

from miles.config import RunConfig
from miles.ray.calendar import due
from miles.ray.checkpointer import Checkpointer
from miles.ray.handover import Handover
from miles.ray.train.models import TrainingModels
from miles.tracking.report import Report


class Training:
    """Trains the models on a rollout.

    Args:
        config: the run's configuration, with num_rollout set.
        models: what is trained.
        handover: brings the models to the GPUs in their turns.
        checkpointer: saves the critic while that is there.
        report: where the time goes.
    """

    def __init__(
        self,
        config: RunConfig,
        models: TrainingModels,
        handover: Handover,
        checkpointer: Checkpointer,
        report: Report,
    ):
        self.config = config
        self.models = models
        self.handover = handover
        self.checkpointer = checkpointer
        self.report = report

    async def step(self, rollout_id: int, shards: list[ray.ObjectRef]) -> dict[str, float]:
        """Train on one rollout, whose first model is on the GPUs; returns the metrics of training.

        A critic goes first. It is saved before it leaves, and the actor learns from its values. In the run's first
        --num-critic-only-steps rollouts the actor comes only if it is saved afterwards.

        Args:
            shards: an object reference a data-parallel rank.
        """
        actor, critic, today = self.models.actor, self.models.critic, due(self.config, rollout_id)
        metrics: dict[str, float] = {}
        values = None
        if critic is not None:
            with self.report.timer("train"):
                metrics, values = await critic.train(rollout_id, shards)
            with self.report.timer("save"):
                if today.save:
                    await self.checkpointer.save_critic(rollout_id)
            if today.actor_training or today.save:
                await self.handover.to_actor()
        if today.actor_training:
            with self.report.timer("train"):
                metrics |= await actor.train(rollout_id, shards, values)
        return metrics
