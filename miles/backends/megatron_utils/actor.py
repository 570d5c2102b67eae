"""MegatronTrainRayActor: one rank of the trainer, as a Ray actor."""

import contextlib
import functools
import logging
import time
from collections.abc import Sequence

import numpy as np
import ray
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from miles.backends.megatron_utils import checkpoint, step_metrics, torch_adam
from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.hf_weights import load_into
from miles.backends.megatron_utils.host_weights import HostWeights, check_same_computation
from miles.backends.megatron_utils.initialize import build_process_groups, initialize, timeout
from miles.backends.megatron_utils.model import build_model, build_train_state, parallel_info
from miles.backends.megatron_utils.process_groups import SubGroups
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
from miles.hf.config import load_hf_config
from miles.residency.plan import Move, Party
from miles.training.data_postprocess import postprocessed
from miles.training.rollout_columns import masked_means, trained_columns
from miles.training.schedule import TrainShard
from miles.utils.agreement import Agreement
from miles.utils.checkpoint_folder import REFERENCE, locate, partial_folder
from miles.utils.disk import writing
from miles.utils.errors import UserError
from miles.utils.network import free_ports, host_port
from miles.weight_sync.export import save_hf
from miles.weight_sync.gather import live
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.updater import WeightUpdater

logger = logging.getLogger(__name__)


class MegatronTrainRayActor:
    """Holds this rank's part of the model and trains it.

    Args:
        config: the run's configuration, complete (num_rollout is set, the checkpoint to load is found).
        rank, world_size: this rank's place among the trainer's ranks.
    """

    party = Party.ACTOR

    def __init__(self, config: RunConfig, rank: int, world_size: int):
        self.config = config
        self.rank = rank
        self.world_size = world_size
        # Further weights of the same model, on the host: the reference, a teacher, and what the engines got last.
        self.reference: HostWeights | None = None
        self.reference_moved = False
        self.teacher: HostWeights | None = None
        self.old_actor: HostWeights | None = None
        self.streamed: StreamedOptimizer | None = None
        self.updater: WeightUpdater | None = None
        self.checked_log_probs = False

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
        # While a trainer sleeps, Megatron's groups are away; and on a GPU its communicators are for what is large.
        self.agreement = Agreement(dist.new_group(backend="gloo", timeout=timeout(config)))
        self.chunks = build_model(config, self.hf_config)
        self.parallel = parallel_info(self.chunks[0].config)
        self._load_weights()
        self.state = build_train_state(self._continued_config(), self.chunks, self._total_steps())
        self._load_checkpoint()
        self.trainer = self._shard_trainer()
        groups = SubGroups(functools.partial(build_process_groups, config), self.agreement)
        if config.stream_optimizer_state_to_disk:
            # It takes over the optimizer's step and its state in checkpoints.
            self.streamed = StreamedOptimizer(
                self.state,
                config.offload_train_disk_dir,
                config.offload_train_disk_chunk_mb * 2**20,
                MOMENT_DTYPES[config.stream_optimizer_state_moment_dtype],
                pinned=config.device == "cuda",
                agreement=self.agreement,
            )
        self.residency = (
            build_residency(config, self.rank, self.state, groups, self.party) if config.offload_train else None
        )

    # What a critic does in its own way

    def _load_weights(self) -> None:
        """Fill the model from Hugging Face folders: others' weights first, which are kept as copies, its own last."""
        config = self.config
        if config.needs_reference:
            self.reference = self._load_other("--ref-load", config.ref_load)
        if config.opd_teacher_load is not None:
            self.teacher = self._load_other("--opd-teacher-load", config.opd_teacher_load)
        self._load_hf_weights(config.hf_checkpoint)

    def _total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        config = self.config
        return (config.num_rollout - config.num_critic_only_steps) * config.steps_per_rollout

    def _shard_trainer(self) -> ShardTrainer:
        return ShardTrainer(self.config, self.hf_config.vocab_size)

    # Loading

    def _load_hf_weights(self, folder: str) -> None:
        load_into(self.chunks, self.family, self.hf_config, folder, self.parallel)

    def _load_other(self, flag: str, folder: str) -> HostWeights:
        check_same_computation(flag, folder, self.hf_config, load_hf_config(folder))
        self._load_hf_weights(folder)
        return HostWeights(self.chunks, f"{flag} {folder}")

    def _continued_config(self) -> RunConfig:
        """With the optimizer's settings of the checkpoint where the user gave none."""
        config = self.config
        if config.load is None or config.no_load_optim:
            return config
        return checkpoint.continued_config(locate(config.load, config.ckpt_step), config)

    def _load_checkpoint(self) -> None:
        config = self.config
        if config.load is not None:
            folder = locate(config.load, config.ckpt_step)
            if self.reference is not None and (folder / REFERENCE).exists():
                with self.reference.swapped_in():
                    checkpoint.load_weights(folder / REFERENCE, self.state)
                self.reference_moved = True
            checkpoint.load(folder, self.state, with_optimizer=not config.no_load_optim)
            logger.info("continuing from %s", folder)
        if config.keep_old_actor:
            self.old_actor = HostWeights(self.chunks, "--keep-old-actor")

    # Training

    def train(self, rollout_id: int, shard: TrainShard, values: torch.Tensor | None = None) -> dict[str, float]:
        """Train on this data-parallel rank's shard; returns metrics on one rank, {} on the others.

        A metric is the mean over the rollout's optimizer steps, or its extreme if its name ends in `_max` or `_min`.

        Args:
            values: the critic's value of each response token of the shard, flat, on the CPU, on the last pipeline
                stage. None elsewhere and without a critic.

        Raises:
            RuntimeError: in the first rollout, trainer and engine disagree about log-probabilities by more than
                --max-logprob-abs-diff.
            FloatingPointError: too many gradients in a row were not finite.
        """
        config, watch = self.config, Stopwatch()
        self._begin_training()
        columns: dict[str, torch.Tensor] = {}
        metrics: dict[str, float] = {}
        if config.loss_type != "sft_loss":
            columns = self._forward(rollout_id, shard, watch)
            if parallel_state.is_pipeline_last_stage():
                if values is not None:
                    columns["values"] = values
                columns |= trained_columns(config, shard.batch, columns, self._sum_over_rollout)
                columns |= postprocessed(config, rollout_id, shard.batch, columns)
                means = masked_means(shard.batch, columns, self._sum_over_rollout)
                metrics = {f"rollout/{name.removeprefix('old_')}": mean for name, mean in means.items()}
        with watch("actor_train"):
            steps = self.trainer.train(self.state, shard, columns)
        if config.ref_update_interval is not None and (rollout_id + 1) % config.ref_update_interval == 0:
            self.reference.take(live)
            self.reference_moved = True
        trained = self._step_metrics(steps, watch)
        return trained | metrics if trained else {}

    def _begin_training(self) -> None:
        if self.residency is not None:
            self.residency.wake_up()
        if self.config.reset_optimizer_states:
            if self.streamed is None:
                torch_adam.reset_states(self.state.optimizer)
            else:
                self.streamed.reset_states()

    def _forward(self, rollout_id: int, shard: TrainShard, watch: Stopwatch) -> dict[str, torch.Tensor]:
        """The forward passes before the optimizer steps: flat columns on the last pipeline stage, {} elsewhere."""
        config, columns = self.config, {}

        def scores(name: str, weights: HostWeights | None) -> tuple[torch.Tensor, ...] | None:
            with watch(name), contextlib.nullcontext() if weights is None else weights.swapped_in():
                return self.trainer.scores(self.state.chunks, shard)

        for name, weights in (("ref_log_probs", self.reference), ("teacher_log_probs", self.teacher)):
            if weights is not None and (found := scores(name, weights)) is not None:
                columns[name] = found[0]
        spared = config.use_rollout_logprobs or config.skip_actor_forward_only
        if not spared or not self.checked_log_probs:
            found = scores("log_probs", self.old_actor)
            if not self.checked_log_probs:
                self._check_log_probs(None if found is None else found[0], shard, rollout_id)
                self.checked_log_probs = True
            if found is not None and not spared:
                columns["old_log_probs"], columns["entropy"] = found
        return columns

    def _sum_over_rollout(self, sums: torch.Tensor) -> None:
        """Add up over the ranks that share the rollout out, in place; context-parallel ranks have the same tokens."""
        on_device = sums.to(self.config.device)
        dist.all_reduce(on_device, group=parallel_state.get_data_parallel_group())
        sums.copy_(on_device)

    def _step_metrics(self, steps: list[dict[str, float]], watch: Stopwatch) -> dict[str, float]:
        """What the rank that reports says about the optimizer steps of a rollout; {} on the others."""
        if not self._reports():
            return {}
        taken = {"train/step": float(self.state.scheduler.num_steps)}
        return step_metrics.of_rollout(steps) | taken | watch.metrics

    def _reports(self) -> bool:
        return (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        )

    def _check_log_probs(self, log_probs: torch.Tensor | None, shard: TrainShard, rollout_id: int) -> None:
        """Once, before any training: do engine and trainer hold the same model? All ranks raise, or none.

        What older weights wrote, as a resumed run may have, says nothing: it is left out.

        log_probs: on the last pipeline stage, else None.
        """
        total = torch.zeros(2, dtype=torch.float32, device=self.config.device)
        if log_probs is not None:
            compared = shard.batch["loss_masks"] > 0
            if "stale" in shard.batch:
                compared &= np.repeat(shard.batch["stale"] == 0, shard.batch.response_lengths)
            gaps = np.abs(log_probs.numpy() - shard.batch["rollout_log_probs"])[compared]
            total = torch.tensor([gaps.sum(), len(gaps)], dtype=torch.float32, device=self.config.device)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        mean = (total[0] / total[1].clamp(min=1)).item()
        bound = self.config.max_logprob_abs_diff
        if not mean <= bound:
            raise UserError(
                f"after the first weight sync the trainer's and the engine's log-probabilities of rollout {rollout_id} "
                f"differ by {mean:.4g} on average, the bound is {bound:.4g} (--max-logprob-abs-diff): the two do not "
                "hold the same model; check --hf-checkpoint, precision and --sglang-* arguments"
            )
        if total[1] > 0:
            logger.info("trainer and engine log-probabilities differ by %.3g on average (bound %.3g)", mean, bound)
        else:
            logger.warning("rollout %d has no token of the newest weights: engine and trainer go unchecked", rollout_id)

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
            agreement=self.agreement,
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
        read = live if self.residency is None else self.residency.read_weight
        metrics = self.updater.update(version, read)
        if self.old_actor is not None:
            self.old_actor.take(read)
        return metrics if self.rank == 0 else {}

    def disconnect(self) -> None:
        """After the last `update_weights`: leave nothing of it in the engines, which may live on."""
        self.updater.close()

    def save(self, rollout_id: int) -> None:
        """Write this rank's part of the checkpoint of `rollout_id`, awake or asleep."""
        with self._awake():
            with_optimizer = not self.config.no_save_optim
            checkpoint.save(self.config.save, rollout_id, self.state, with_optimizer, self.agreement)
            if self.reference_moved:
                with self.reference.swapped_in():
                    folder = partial_folder(self.config.save, rollout_id) / REFERENCE
                    checkpoint.save_weights(folder, self.state, self.agreement)
            empty_caches(torch.device(self.config.device))  # the writer's pinned buffers are as large as the state

    def export_hf(self, rollout_id: int) -> None:
        """Write the weights as a Hugging Face checkpoint to the folder that --save-hf names, awake or asleep."""
        folder = self.config.save_hf.format(rollout_id=rollout_id)
        source, is_writer = self.config.hf_checkpoint, self.rank == 0
        with self._awake(), writing("--save-hf", folder):
            save_hf(folder, self.chunks, self.family, self.hf_config, self.parallel, source, is_writer, self.agreement)

    # Where the memory is; see TrainerResidency for each verb.

    def move(self, moves: Sequence[Move]) -> dict[str, float]:
        """Make moves of the planner, but for those that are made already; returns metrics."""
        return self._residency().move(moves)

    def sleep(self) -> dict[str, float]:
        """Leave the GPU; returns metrics. Does nothing where this rank is asleep already."""
        return self._residency().sleep()

    def wake_up(self) -> dict[str, float]:
        """Come back to the GPU; returns metrics. Does nothing where this rank is awake."""
        return self._residency().wake_up()

    def offload_grad_buffer(self) -> dict[str, float]:
        """Drop the gradients ahead of the sleep."""
        return self._residency().offload_grad_buffer()

    def clear_memory(self) -> dict[str, float]:
        """Give cached memory back, asleep or awake; returns metrics."""
        started = time.perf_counter()
        drop_quantized_workspaces(self.chunks)
        empty_caches(torch.device(self.config.device))
        return {"perf/clear_memory_time": time.perf_counter() - started}

    def _residency(self) -> TrainerResidency:
        if self.residency is None:
            raise UserError("the trainer's memory can only move with --offload-train, which is off")
        return self.residency

    def _awake(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.residency is None else self.residency.awake()
