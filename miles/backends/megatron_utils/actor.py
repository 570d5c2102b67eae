"""MegatronTrainRayActor: one rank of the trainer, as a Ray actor."""

import contextlib
import functools
import logging
import time

import numpy as np
import ray
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from miles.backends.megatron_utils import checkpoint
from miles.backends.megatron_utils.hf import family_for, load_hf_config
from miles.backends.megatron_utils.hf.checkpoint_io import load_into
from miles.backends.megatron_utils.initialize import build_process_groups, initialize, timeout
from miles.backends.megatron_utils.model import build_model, build_train_state, parallel_info
from miles.backends.megatron_utils.process_groups import SubGroups
from miles.backends.megatron_utils.reference import ReferenceWeights
from miles.backends.megatron_utils.residency import (
    TrainerResidency,
    build_residency,
    drop_quantized_workspaces,
    empty_caches,
)
from miles.backends.megatron_utils.streamed_optimizer import StreamedOptimizer
from miles.backends.megatron_utils.streamed_state import MOMENT_DTYPES
from miles.backends.megatron_utils.training import ShardTrainer, Stopwatch
from miles.config import RunConfig
from miles.training.schedule import TrainShard
from miles.utils.checkpoint_folder import find_checkpoint
from miles.utils.network import free_ports, host_port
from miles.weight_sync.export import save_hf
from miles.weight_sync.gather import live
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.updater import WeightUpdater

logger = logging.getLogger(__name__)


class MegatronTrainRayActor:
    """Holds this rank's part of the model and trains it.

    Args:
        config: the run's configuration, complete (num_rollout is set).
        rank, world_size: this rank's place among the trainer's ranks.
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int):
        self.config = config
        self.rank = rank
        self.world_size = world_size

    def master_address(self) -> str:
        """An address on this rank's node for the ranks to meet at."""
        ip = ray.util.get_node_ip_address()
        return host_port(ip, free_ports(1, ip)[0])

    def init(self, master: str) -> None:
        """Join the other ranks, build the model, and load the checkpoint of --load, else --hf-checkpoint's weights."""
        config = self.config
        self.hf_config = load_hf_config(config.hf_checkpoint)
        self.family = family_for(self.hf_config)
        self.family.check_layout(self.hf_config, config.parallel_sizes)
        initialize(config, self.rank, self.world_size, master)
        self.chunks = build_model(config, self.hf_config)
        self.parallel = parallel_info(self.chunks[0].config)
        self.reference = None
        if config.use_kl_loss:
            self._load_hf_weights(config.ref_load)
            self.reference = ReferenceWeights(self.chunks)
        self._load_hf_weights(config.hf_checkpoint)
        self.state = build_train_state(config, self.chunks, config.num_rollout * config.steps_per_rollout)
        self.first_rollout_id = 0
        found = find_checkpoint(config.load, config.ckpt_step) if config.load else None
        if found is not None:
            rollout_id, folder = found
            checkpoint.load(folder, self.state, with_optimizer=not config.no_load_optim)
            self.first_rollout_id = rollout_id + 1
            logger.info("continuing from %s", folder)
        self.trainer = ShardTrainer(config, self.hf_config.vocab_size)
        self.updater: WeightUpdater | None = None
        self.checked_log_probs = False
        # First, since all ranks build it together: what follows may fail on one.
        groups = SubGroups(functools.partial(build_process_groups, config), timeout(config))
        if config.stream_optimizer_state_to_disk:
            # It takes over the optimizer's step and its state in checkpoints.
            StreamedOptimizer(
                self.state,
                config.offload_train_disk_dir,
                config.offload_train_disk_chunk_mb * 2**20,
                MOMENT_DTYPES[config.stream_optimizer_state_moment_dtype],
                pinned=config.device == "cuda",
            )
        self.residency = build_residency(config, self.rank, self.state, groups) if config.offload_train else None

    def _load_hf_weights(self, folder: str) -> None:
        load_into(self.chunks, self.family, self.hf_config, folder, self.parallel)

    def start_rollout_id(self) -> int:
        """The rollout to start with: --start-rollout-id, else the one after the loaded checkpoint's."""
        explicit = self.config.start_rollout_id
        return self.first_rollout_id if explicit is None else explicit

    def train(self, rollout_id: int, shard: TrainShard) -> dict[str, float]:
        """Train on this data-parallel rank's shard; returns metrics on one rank, {} on the others.

        A metric is the mean over the rollout's optimizer steps.

        Raises:
            RuntimeError: in the first rollout, trainer and engine disagree about log-probabilities by more than
                --max-logprob-abs-diff.
        """
        config, watch = self.config, Stopwatch()
        if self.residency is not None:
            self.residency.wake_up()
        columns: dict[str, torch.Tensor] = {}
        if config.loss_type == "policy_loss":
            if self.reference is not None:
                with watch("ref_log_probs"), self.reference.swapped_in(self.chunks):
                    ref_log_probs = self.trainer.log_probs(self.state.chunks, shard)
                if ref_log_probs is not None:
                    columns["ref_log_probs"] = ref_log_probs
            if not config.use_rollout_logprobs or not self.checked_log_probs:
                with watch("log_probs"):
                    old_log_probs = self.trainer.log_probs(self.state.chunks, shard)
                if old_log_probs is not None:
                    columns["old_log_probs"] = old_log_probs
                    if not self.checked_log_probs:
                        self._check_log_probs(old_log_probs, shard, rollout_id)
                self.checked_log_probs = True
        with watch("actor_train"):
            steps = self.trainer.train(self.state, shard, columns)
        if not self._reports():
            return {}
        metrics = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        return metrics | {"train/step": float(self.state.scheduler.num_steps)} | watch.metrics

    def _reports(self) -> bool:
        return (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        )

    def _check_log_probs(self, log_probs: torch.Tensor, shard: TrainShard, rollout_id: int) -> None:
        """Once, on the last stage, before any training: do engine and trainer hold the same model?"""
        gaps = np.abs(log_probs.numpy() - shard.batch["rollout_log_probs"])[shard.batch["loss_masks"] > 0]
        total = torch.tensor([gaps.sum(), len(gaps)], dtype=torch.float32, device=self.config.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        mean = (total[0] / total[1].clamp(min=1)).item()
        bound = self.config.max_logprob_abs_diff
        if not mean <= bound:
            raise RuntimeError(
                f"after the first weight sync the trainer's and the engine's log-probabilities of rollout {rollout_id} "
                f"differ by {mean:.4g} on average, the bound is {bound:.4g} (--max-logprob-abs-diff): the two do not "
                "hold the same model; check --hf-checkpoint, precision and --sglang-* arguments"
            )
        logger.info("trainer and engine log-probabilities differ by %.3g on average (bound %.3g)", mean, bound)

    def connect(self, engines: list[EngineTarget]) -> None:
        """Prepare to send weights to `engines`."""
        config = self.config
        self.updater = WeightUpdater(
            chunks=self.chunks,
            family=self.family,
            hf_config=self.hf_config,
            parallel=self.parallel,
            checkpoint_folder=config.hf_checkpoint,
            engines=engines,
            rank=self.rank,
            group=dist.new_group(timeout=timeout(config), backend="gloo"),
            address=ray.util.get_node_ip_address(),
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

    def update_weights(self, version: int) -> dict[str, float]:
        """Send the weights to the engines as `version`, awake or asleep; metrics on rank 0."""
        metrics = self.updater.update(version, live if self.residency is None else self.residency.read_weight)
        return metrics if self.rank == 0 else {}

    def disconnect(self) -> None:
        """After the last `update_weights`: leave nothing of it in the engines, which may live on."""
        self.updater.close()

    def save(self, rollout_id: int) -> None:
        """Write this rank's part of the checkpoint of `rollout_id`, awake or asleep."""
        with self._awake():
            checkpoint.save(self.config.save, rollout_id, self.state, with_optimizer=not self.config.no_save_optim)
            empty_caches(torch.device(self.config.device))  # the writer's pinned buffers are as large as the state

    def export_hf(self, rollout_id: int) -> None:
        """Write the weights as a Hugging Face checkpoint to the folder that --save-hf names, awake or asleep."""
        folder = self.config.save_hf.format(rollout_id=rollout_id)
        source, is_writer = self.config.hf_checkpoint, self.rank == 0
        with self._awake():
            # Experts are spread over data-parallel ranks.
            if parallel_state.get_data_parallel_rank() == 0 or self.parallel.ep_size > 1:
                save_hf(folder, self.chunks, self.family, self.hf_config, self.parallel, source, is_writer)
            dist.barrier()

    # Where the memory is; see TrainerResidency for each verb.

    def sleep(self) -> dict[str, float]:
        """Leave the GPU; returns metrics. Does nothing where this rank is asleep already."""
        return self._residency().sleep()

    def wake_up(self) -> dict[str, float]:
        """Come back to the GPU; returns metrics. Does nothing where this rank is awake."""
        return self._residency().wake_up()

    def onload(self) -> dict[str, float]:
        """Wake up ahead of `train()`, which would do it too."""
        return self.wake_up()

    def offload_grad_buffer(self) -> dict[str, float]:
        """Drop the gradients ahead of the sleep."""
        return self._residency().offload_grad_buffer()

    def destroy_process_groups(self) -> dict[str, float]:
        """Destroy the sub process groups after a weight sync in the sleep; returns metrics."""
        return self._residency().destroy_process_groups()

    def clear_memory(self) -> dict[str, float]:
        """Give cached memory back, asleep or awake; returns metrics."""
        started = time.perf_counter()
        drop_quantized_workspaces(self.chunks)
        empty_caches(torch.device(self.config.device))
        return {"perf/clear_memory_time": time.perf_counter() - started}

    def _residency(self) -> TrainerResidency:
        if self.residency is None:
            raise ValueError("the trainer's memory can only move with --offload-train, which is off")
        return self.residency

    def _awake(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.residency is None else self.residency.awake()
