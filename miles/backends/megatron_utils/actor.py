"""MegatronTrainRayActor: one rank of the Megatron trainer, as a Ray actor."""

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.initialize import initialize
from miles.backends.megatron_utils.trained_model import MegatronModel
from miles.backends.trainer.actor import TrainRayActor
from miles.backends.trainer.rank import RankActor
from miles.hf.config import load_hf_config


class MegatronRank(RankActor):
    """What actor and critic share."""

    model: MegatronModel

    def _build_model(self, master: str) -> MegatronModel:
        config, hf_config = self.config, load_hf_config(self.config.hf_checkpoint)
        # Said before the ranks have met.
        family_for(hf_config).check_layout(hf_config, config.parallel_sizes)
        initialize(config, self.rank, self.world_size, master)
        return MegatronModel(config, hf_config, self.party)


class MegatronTrainRayActor(MegatronRank, TrainRayActor):
    """Holds this rank's part of a Megatron model and trains it. Arguments as for RankActor."""
