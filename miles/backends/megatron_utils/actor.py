"""MegatronTrainRayActor: one rank of the Megatron trainer, as a Ray actor."""

import functools

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.initialize import build_process_groups, initialize
from miles.backends.megatron_utils.process_groups import SubGroups
from miles.backends.megatron_utils.residency import TrainerResidency, build_residency
from miles.backends.megatron_utils.trained_model import MegatronModel
from miles.backends.trainer.actor import TrainRayActor
from miles.backends.trainer.world import timeout
from miles.hf.config import load_hf_config
from miles.weight_sync.export import save_hf
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.updater import WeightUpdater


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

    def _build_updater(self, engines: list[EngineTarget], address: str) -> WeightUpdater:
        config, model = self.config, self.model
        return WeightUpdater(
            chunks=model.chunks,
            family=model.family,
            hf_config=model.hf_config,
            parallel=model.parallel,
            checkpoint_folder=config.hf_checkpoint,
            engines=engines,
            rank=self.rank,
            agreement=self.agreement,
            address=address,
            buffer_size=config.update_weight_buffer_size,
            reads_copy=self.residency is not None,
            # A released cache was flushed before its memory went, and must not be touched.
            flush_cache=not (config.offload_rollout and "kv_cache" in config.offload_rollout_level),
            pause_mode=config.pause_generation_mode,
            transfer_mode=config.update_weight_transfer_mode,
            disk_folder=config.update_weight_disk_dir,
            check_equal=config.check_weight_update_equal,
            timeout=timeout(config),
        )

    def _save_hf(self, folder: str) -> None:
        model, source, is_writer = self.model, self.config.hf_checkpoint, self.rank == 0
        save_hf(folder, model.chunks, model.family, model.hf_config, model.parallel, source, is_writer, self.agreement)


class MegatronTrainRayActor(MegatronRank):
    """Holds this rank's part of a Megatron model and trains it. Arguments as for TrainRayActor."""
