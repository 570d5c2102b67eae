"""MegatronModel: one rank's part of a Megatron model, as a trainer uses it (`miles.backends.trainer.protocol`)."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from transformers import PreTrainedConfig

from miles.backends.megatron_utils import checkpoint, regions, torch_adam
from miles.backends.megatron_utils.expert_load import ExpertLoad
from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.hf_weights import load_into, model_tensors
from miles.backends.megatron_utils.initialize import build_process_groups
from miles.backends.megatron_utils.logits import score_responses
from miles.backends.megatron_utils.masters import MasterWeights
from miles.backends.megatron_utils.model import TrainState, build_model, build_train_state, parallel_info
from miles.backends.megatron_utils.patches import cpu_support
from miles.backends.megatron_utils.patches.process_groups import SubGroups
from miles.backends.megatron_utils.same_computation import check_same_computation
from miles.backends.megatron_utils.streamed_optimizer import StreamedOptimizer
from miles.backends.megatron_utils.streamed_state import MOMENT_DTYPES
from miles.backends.megatron_utils.training import Score, run_micro_batches
from miles.backends.megatron_utils.value_head import replace_heads, score_values
from miles.backends.megatron_utils.weight_source import MegatronWeights
from miles.backends.trainer.protocol import ProcessGrid, ScoreFunction, Scoring
from miles.config import RunConfig
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.residency.memory import DeviceMemory
from miles.residency.plan import Party, Region
from miles.training.packing import PackedBatch
from miles.utils.agreement import Agreement
from miles.weight_sync.source import Read, WeightSource


class MegatronModel:
    """See `TrainedModel` for what it does. Needs Megatron's process groups.

    Args:
        config: the run's configuration.
        hf_config: that of the checkpoint in --hf-checkpoint.
        party: whose model it is: a critic has a value head in the place of the output layer.

    Attributes:
        chunks: the model's parts on this pipeline stage, unwrapped.
        state: those parts wrapped for data parallelism, with optimizer and schedule, from `build_optimizer` on.
        streamed: what takes the optimizer's steps with --stream-optimizer-state-to-disk, from `begin` on.

    Raises:
        ValueError: the model cannot have the run's parallel sizes.
    """

    state: TrainState
    groups: SubGroups

    def __init__(self, config: RunConfig, hf_config: PreTrainedConfig, party: Party = Party.ACTOR):
        self.config, self.hf_config, self.party = config, hf_config, party
        self.family = family_for(hf_config)
        self.chunks = build_model(config, hf_config)
        self.parallel = parallel_info(self.chunks[0].config)
        self.grid = process_grid(config)
        self.pad_multiple = config.data_pad_size_multiplier * config.tensor_model_parallel_size
        self.scoring = Scoring.of(config, hf_config.vocab_size)
        self.score: Score = score_values if party is Party.CRITIC else score_responses
        self.streamed: StreamedOptimizer | None = None
        self.load = ExpertLoad(self.chunks) if self.chunks[0].config.num_moe_experts else None

    # Weights

    def weights(self) -> list[torch.Tensor]:
        """Parameters, and the buffers that a checkpoint has (biases of a router)."""
        return [weight for chunk in self.chunks for weight in model_tensors(chunk).values()]

    def load_hf(self, folder: str) -> None:
        """Fill the model from a Hugging Face checkpoint; a critic's value head is new."""
        load_into(self.chunks, self.family, self.hf_config, folder, self.parallel)
        if self.party is Party.CRITIC:
            replace_heads(self.chunks)

    def check_same_computation(self, flag: str, folder: str) -> None:
        """Raise ValueError naming what differs, unless the model in `folder` (of `flag`) computes as this one does."""
        check_same_computation(flag, folder, self.hf_config, load_hf_config(folder))

    def weight_source(self, read: Read, copies: bool) -> WeightSource:
        """The weights under the names and in the layouts of the checkpoint in --hf-checkpoint."""
        index = CheckpointIndex(self.config.hf_checkpoint)
        return MegatronWeights(self.chunks, self.family, self.hf_config, self.parallel, index, read, copies)

    # Training

    def build_optimizer(self, config: RunConfig, total_steps: int) -> None:
        """Wrap the model for data parallelism, and build optimizer and schedule."""
        self.state = build_train_state(config, self.chunks, total_steps)

    def begin(self, agreement: Agreement) -> None:
        """Let a streamed optimizer take over the optimizer's step and its state in checkpoints; find the groups."""
        config = self.config
        self.groups = SubGroups(functools.partial(build_process_groups, config), agreement)
        if config.stream_optimizer_state_to_disk:
            assert config.offload_train_disk_dir is not None
            self.streamed = StreamedOptimizer(
                self.state,
                config.offload_train_disk_dir,
                config.offload_train_disk_chunk_mb * 2**20,
                MOMENT_DTYPES[config.stream_optimizer_state_moment_dtype],
                pinned=config.device == "cuda",
                agreement=agreement,
            )

    def run(
        self, micro_batches: Sequence[PackedBatch], function: ScoreFunction, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        """One pass of Megatron's pipeline schedule."""
        chunks = self.state.chunks
        return run_micro_batches(chunks, micro_batches, self.scoring, function, forward_only, self.score)

    def begin_step(self, micro_batches: Sequence[PackedBatch]) -> None:
        """Zero gradients and counts of experts' tokens, and set the scale of the experts' balancing losses."""
        if self.load is not None:
            self.load.begin_step()
        for chunk in self.state.chunks:
            chunk.zero_grad_buffer()
        self.state.optimizer.zero_grad()
        self._scale_router_losses(micro_batches)

    def _scale_router_losses(self, micro_batches: Sequence[PackedBatch]) -> None:
        """Make the experts' balancing losses, each a mean over a micro-batch, add up to the mean over the step.

        Megatron multiplies each with its micro-batch's tokens and leaves the division to the caller.
        """
        if not self.config.moe_aux_loss_coeff and not self.config.moe_z_loss_coeff:
            return
        tokens = torch.tensor(float(sum(len(packed.tokens_T) for packed in micro_batches)), device=self.config.device)
        dist.all_reduce(tokens, group=self.grid.dp_cp_group())
        self.state.models[0].config.moe_grad_scale_func = lambda: 1 / tokens

    def end_passes(self) -> dict[str, float]:
        """The load of the experts."""
        return {} if self.load is None else self.load.end_passes()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The norm that Megatron's `step()` would clip with; it would then update whatever the norm is."""
        with cpu_support.cuda_type_names():
            overflowed = self.state.optimizer.prepare_grads()
            assert not overflowed, "only fp16 has a loss scale that can overflow"
            return float(self.state.optimizer.get_grad_norm())

    @torch.no_grad()
    def apply_gradients(self, norm: float) -> None:
        """Clip and update as Megatron's `step()` does, move selection biases, and advance the schedule."""
        assert math.isfinite(norm)
        with cpu_support.cuda_type_names():
            for part in torch_adam.megatron_optimizers(self.state.optimizer):
                parameters = part.get_parameters()
                if parameters and part.config.clip_grad > 0:
                    clip_grads.clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
            succeeded = self.state.optimizer.step_with_ready_grads()
            assert succeeded
        if self.load is not None and self.config.moe_router_bias_update_rate:
            self.load.move_biases(self.config.moe_router_bias_update_rate)
        self.state.scheduler.step(increment=1)

    def end_steps(self) -> None:
        """Wait for gathers of parameters: what reads weights next need not be a forward pass, which would."""
        if self.config.overlap_param_gather:
            for chunk in self.state.chunks:
                chunk.start_param_sync(force_sync=True)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self.state.optimizer.param_groups[0]["lr"])

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, those of earlier runs included."""
        return self.state.scheduler.num_steps

    def reset_optimizer(self) -> None:
        """Zero moments and their step counters."""
        if self.streamed is None:
            torch_adam.reset_states(self.state.optimizer)
        else:
            self.streamed.reset_states()

    # Checkpoints

    def save_state(self, folder: Path, with_optimizer: bool) -> None:
        """Write this rank's part in Megatron's resharding format."""
        checkpoint.save(folder, self.state, with_optimizer)

    def load_state(self, folder: Path, with_optimizer: bool) -> None:
        """Read what was saved under any parallel sizes."""
        checkpoint.load(folder, self.state, with_optimizer)

    def save_weights(self, folder: Path) -> None:
        """Write the weights alone."""
        checkpoint.save_weights(folder, self.state)

    def load_weights(self, folder: Path) -> None:
        """Read what `save_weights` wrote under any parallel sizes."""
        checkpoint.load_weights(folder, self.state)

    def saved_settings(self, folder: Path) -> dict[str, Any] | None:
        """The optimizer's settings in a checkpoint; None where it has no optimizer's state."""
        return checkpoint.saved_settings(folder)

    def is_of_critic(self, folder: Path) -> bool:
        """Whether the checkpoint at `folder` has a value head."""
        return checkpoint.is_of_critic(folder)

    # Memory

    def build_regions(self, memory: DeviceMemory) -> dict[Region, list[torch.Tensor]]:
        """Move Megatron's buffers and the optimizer's state into regions."""
        return regions.build_regions(self.state, memory, self.config.stream_optimizer_state_to_disk)

    def lasting_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers, masters, moments and step counters."""
        return regions.lasting_tensors(self.state, self.config.stream_optimizer_state_to_disk)

    def master_weights(self, contents: Callable[[torch.Tensor], torch.Tensor]) -> MasterWeights:
        """The weights from the distributed optimizer's masters."""
        return MasterWeights(self.state.chunks, self.state.optimizer, contents)

    def drop_workspaces(self) -> None:
        """Drop Transformer Engine's quantised copies of weights."""
        regions.drop_quantized_workspaces(self.chunks)


def process_grid(config: RunConfig) -> ProcessGrid:
    """This rank's place in Megatron's grid."""

    def dp_cp_group() -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    is_last_stage = parallel_state.is_pipeline_last_stage()
    return ProcessGrid(
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=config.context_parallel_size,
        is_last_stage=is_last_stage,
        reports=is_last_stage
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
        dp_group=parallel_state.get_data_parallel_group,
        dp_cp_group=dp_cp_group,
        cp_group=parallel_state.get_context_parallel_group,
        pp_group=parallel_state.get_pipeline_model_parallel_group,
    )
