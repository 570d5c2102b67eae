"""MegatronTrainRayActor: one rank of the Megatron trainer, as a Ray actor."""

import functools

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.initialize import build_process_groups, initialize
from miles.backends.megatron_utils.patches.process_groups import SubGroups
from miles.backends.megatron_utils.residency import TrainerResidency, build_residency
from miles.backends.megatron_utils.trained_model import MegatronModel
from miles.backends.trainer.actor import TrainRayActor
from miles.hf.config import load_hf_config


class MegatronRank(TrainRayActor):
    """What actor and critic share."""

    model: MegatronModel

    def _build_model(self, master: str) -> MegatronModel:
        config, hf_config = self.config, load_hf_config(self.config.hf_checkpoint)
        # Said before the ranks have met.
        family_for(hf_config).check_layout(hf_config, config.parallel_sizes)
        initialize(config, self.rank, self.world_size, master)
        return MegatronModel(config, hf_config, self.party)

    def _build_residency(self) -> TrainerResidency:
        groups = SubGroups(functools.partial(build_process_groups, self.config), self.agreement)
        return build_residency(self.config, self.rank, self.model.state, groups, self.party)


class MegatronTrainRayActor(MegatronRank):
    """Holds this rank's part of a Megatron model and trains it. Arguments as for TrainRayActor."""
