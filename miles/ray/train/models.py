"""All that is trained: the actor and its critic."""

from dataclasses import dataclass

from miles.ray.train.group import CriticGroup, TrainGroup


@dataclass(frozen=True)
class TrainingModels:
    """The actor and, with ppo, its critic.

    Args:
        actor: its ranks; none with --debug-rollout-only.
        critic: its ranks, in the actor's layout and on its GPUs, or None.
    """

    actor: TrainGroup
    critic: CriticGroup | None
