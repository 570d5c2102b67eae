"""Sizes that follow from the fields."""


class Layout:
    """Properties of a configuration; each is a function of its fields and of nothing else."""

    @property
    def world_size(self) -> int:
        """Ranks of the trainer."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model in the trainer."""
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)

    @property
    def needs_engines(self) -> bool:
        """Whether SGLang engines run: not for supervised steps, nor with --debug-train-only."""
        return self.loss_type != "sft_loss" and not self.debug_train_only

    @property
    def needs_trainer(self) -> bool:
        """Whether a trainer runs: not with --debug-rollout-only."""
        return not self.debug_rollout_only

    @property
    def trainer_uses_disk(self) -> bool:
        """Whether anything of the trainer goes to --offload-train-disk-dir."""
        return self.offload_train_target == "disk" or self.stream_optimizer_state_to_disk

    @property
    def num_engines(self) -> int:
        """SGLang engines."""
        return self.rollout_num_gpus // self.rollout_num_gpus_per_engine

    @property
    def samples_per_rollout(self) -> int:
        """Samples that one rollout generates."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of one rollout."""
        return self.samples_per_rollout // self.global_batch_size
