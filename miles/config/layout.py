"""Sizes that follow from the fields."""

from typing import Any

from miles.hf.parallel import ParallelSizes
from miles.hf.shape import model_shape
from miles.training.advantages import ESTIMATORS, Estimator

GENERATE_HUB = "miles.rollout.generate_hub."  # what is here to generate with


class Layout:
    """Properties of a configuration; each is a function of its fields and of the model's config.json.

    The fields are another class's, RunConfig's or those of a configuration in the making: hence `self: Any`.
    """

    @property
    def world_size(self: Any) -> int:
        """Ranks of the trainer."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def data_parallel_size(self: Any) -> int:
        """Replicas of the model in the trainer."""
        return self.world_size // self.model_parallel_size

    @property
    def model_parallel_size(self: Any) -> int:
        """Ranks that hold one replica together."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def parallel_sizes(self: Any) -> ParallelSizes:
        """All of them in one object."""
        return ParallelSizes(
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
            dp=self.data_parallel_size,
            sequence_parallel=self.sequence_parallel,
        )

    @property
    def sharers_of_experts(self: Any) -> int:
        """Ranks that hold the experts of a layer together."""
        return self.expert_model_parallel_size * self.expert_tensor_parallel_size

    @property
    def least_micro_batches(self: Any) -> int:
        """Micro-batches that a step needs on each replica: interleaved pipeline stages take one each at a time."""
        return 1 if self.num_layers_per_virtual_pipeline_stage is None else self.pipeline_model_parallel_size

    @property
    def virtual_stages(self: Any) -> int | None:
        """Chunks of the model on each pipeline stage; None where stages are not interleaved."""
        chunk, shape = self.num_layers_per_virtual_pipeline_stage, model_shape(self.hf_checkpoint)
        if chunk is None or shape is None:
            return None
        return shape["num_hidden_layers"] // self.pipeline_model_parallel_size // chunk

    @property
    def max_tokens_per_micro_batch(self: Any) -> int | None:
        """Tokens of one micro-batch with --use-dynamic-batch-size; its sequences lie on all context-parallel ranks."""
        return self.max_tokens_per_gpu and self.max_tokens_per_gpu * self.context_parallel_size

    @property
    def learns_from_samples(self: Any) -> bool:
        """Whether there is something to learn from engines' samples and their rewards: not for supervised steps.

        The samples may also come from files: see `needs_engines`.
        """
        return self.loss_type != "sft_loss"

    @property
    def needs_engines(self: Any) -> bool:
        """Whether SGLang engines run: neither for supervised steps nor with --debug-train-only."""
        return self.learns_from_samples and not self.debug_train_only

    @property
    def needs_trainer(self: Any) -> bool:
        """Whether a trainer runs: not with --debug-rollout-only."""
        return not self.debug_rollout_only

    @property
    def without_engines(self: Any) -> str | None:
        """The flag for which no engine starts; None where engines run."""
        if self.needs_engines:
            return None
        if self.load_debug_rollout_data is not None:
            return "--load-debug-rollout-data"
        return "--debug-train-only" if self.debug_train_only else "--loss-type sft_loss"

    @property
    def lone_side(self: Any) -> str | None:
        """Why only one of trainer and engines runs; None where both do."""
        if not self.needs_engines:
            return f"no engine runs with {self.without_engines}"
        return None if self.needs_trainer else "no trainer runs with --debug-rollout-only"

    @property
    def overlaps(self: Any) -> bool:
        """Whether rollouts are generated while the trainer computes."""
        return self.one_step_ahead or self.fully_async

    @property
    def learns_conversations(self: Any) -> bool:
        """Whether the assistant's part of whole conversations is learned, as no column has the answers."""
        return self.loss_type == "sft_loss" and self.label_key is None

    @property
    def has_reward(self: Any) -> bool:
        """Whether samples are worth something of their own; with --use-opd they need not be."""
        return self.rm_type is not None or self.custom_rm_path is not None or self.generates_by_function

    @property
    def generates_by_function(self: Any) -> bool:
        """Whether samples come from a function of the user's, which may have set their rewards."""
        path = self.custom_generate_function_path
        return self.rollout_function_path is not None or not (path or GENERATE_HUB).startswith(GENERATE_HUB)

    @property
    def use_critic(self: Any) -> bool:
        """Whether a critic is trained beside the actor: not in a run that only evaluates, with --num-rollout 0."""
        trains = self.needs_trainer and self.learns_from_samples and self.num_rollout != 0
        return trains and self.estimator.critic

    @property
    def estimator(self: Any) -> Estimator:
        """The record of --advantage-estimator."""
        return ESTIMATORS[self.advantage_estimator]

    @property
    def needs_reference(self: Any) -> bool:
        """Whether the trainer keeps the weights of a reference model."""
        return self.needs_trainer and self.learns_from_samples and (self.use_kl_loss or self.kl_coef > 0)

    @property
    def trainer_uses_disk(self: Any) -> bool:
        """Whether anything of the trainer goes to --offload-train-disk-dir."""
        return self.offload_train_target == "disk" or self.stream_optimizer_state_to_disk

    @property
    def num_engines(self: Any) -> int:
        """SGLang engines."""
        return self.rollout_num_gpus // self.rollout_num_gpus_per_engine

    @property
    def num_colocated_engines(self: Any) -> int:
        """Engines that share the trainer's GPUs: the first ones. Those behind them have GPUs of their own."""
        return self.world_size // self.rollout_num_gpus_per_engine if self.colocate else 0

    @property
    def engine_tp_size(self: Any) -> int:
        """Tensor-parallel ranks of an engine: its GPUs, shared out among its pipeline stages."""
        return self.rollout_num_gpus_per_engine // self.sglang.get("pp_size", 1)

    @property
    def reserved_rollout_gpus(self: Any) -> int:
        """GPUs that engines are placed on; external ones have theirs elsewhere."""
        return self.rollout_num_gpus if self.needs_engines and not self.rollout_external else 0

    @property
    def samples_per_rollout(self: Any) -> int:
        """Samples that one rollout generates."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def steps_per_rollout(self: Any) -> int:
        """Optimizer steps of one rollout."""
        return -(self.samples_per_rollout // -self.global_batch_size)
