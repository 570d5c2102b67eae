"""MegatronCriticRayActor: one rank of the critic, built with Megatron."""

from miles.backends.megatron_utils.actor import MegatronRank
from miles.backends.trainer.critic import CriticRayActor


class MegatronCriticRayActor(MegatronRank, CriticRayActor):
    """Holds this rank's part of the critic and trains it. Arguments as for RankActor."""
