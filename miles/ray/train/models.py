"""TrainingModels: all that is trained, in its turns on the same GPUs."""

import ray

from miles.config import RunConfig
from miles.ray.checkpointer import Checkpointer
from miles.ray.handover import Handover
from miles.ray.train.group import CriticGroup, TrainGroup
from miles.tracking.report import Report


class TrainingModels:
    """The actor and, with ppo, its critic.

    Args:
        config: the run's configuration.
        actor: its ranks; none with --debug-rollout-only.
        critic: its ranks, or None.
        handover: knows who is on the GPUs.
    """

    def __init__(self, config: RunConfig, actor: TrainGroup, critic: CriticGroup | None, handover: Handover):
        self.config = config
        self.actor = actor
        self.critic = critic
        self.handover = handover

    async def train(
        self, rollout_id: int, shards: list[ray.ObjectRef], checkpointer: Checkpointer, report: Report
    ) -> dict[str, float]:
        """Train on one rollout, whose first model is on the GPUs; returns the metrics of training.

        The critic goes first. It is saved before it leaves, and the actor learns from its values. In the run's first
        --num-critic-only-steps rollouts the actor comes only if it is saved afterwards.

        Args:
            shards: an object reference a data-parallel rank.
            checkpointer, report: what is saved, and where the time goes.
        """
        if self.critic is None:
            with report.timer("train"):
                return await self.actor.train(rollout_id, shards)
        with report.timer("train"):
            metrics, values = await self.critic.train(rollout_id, shards)
        with report.timer("save"):
            await checkpointer.save_critic_if_due(rollout_id)
        is_actors_turn = rollout_id >= self.config.num_critic_only_steps
        if is_actors_turn or checkpointer.is_due(rollout_id):
            await self.handover.to_actor()
        if is_actors_turn:
            with report.timer("train"):
                metrics |= await self.actor.train(rollout_id, shards, values)
        return metrics
