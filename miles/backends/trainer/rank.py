"""RankActor: one rank of a trainer, as a Ray actor, whatever library its model is built with."""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from miles.backends.trainer import checkpoint, step_metrics
from miles.backends.trainer.host_weights import HostWeights
from miles.backends.trainer.protocol import ScoreFunction, TrainedModel
from miles.backends.trainer.residency import TrainerResidency, build_residency, empty_caches
from miles.backends.trainer.shard_trainer import ShardTrainer
from miles.backends.trainer.world import timeout
from miles.config import RunConfig
from miles.hf.fp8 import fp8_weights
from miles.residency.plan import Move, Party
from miles.utils.agreement import Agreement
from miles.utils.checkpoint_folder import REFERENCE, locate, partial_folder
from miles.utils.disk import writing
from miles.utils.errors import UserError
from miles.utils.network import free_ports, host_port
from miles.utils.stopwatch import Stopwatch
from miles.weight_sync.export import save_hf
from miles.weight_sync.format import Fp8Format
from miles.weight_sync.source import live
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.updater import SyncSettings, TrainerRank, WeightUpdater

logger = logging.getLogger(__name__)


class RankActor:
    """Holds this rank's part of a model. What actor and critic share, but for what raises NotImplementedError here.

    Args:
        config: the run's configuration, complete (num_rollout is set, the checkpoint to load is found).
        rank, world_size: this rank's place among the trainer's ranks.
    """

    party: Party
    model: TrainedModel
    agreement: Agreement
    trainer: ShardTrainer

    def __init__(self, config: RunConfig, rank: int, world_size: int):
        self.config = config
        self.rank = rank
        self.world_size = world_size
        # Further weights of the same model, on the host: the reference, and what the engines got last.
        self.reference: HostWeights | None = None
        self.reference_moved = False
        self.old_actor: HostWeights | None = None
        self.updater: WeightUpdater | None = None
        self.residency: TrainerResidency | None = None

    # What a backend does in its own way

    def _build_model(self, master: str) -> TrainedModel:
        """Join the world that meets at `master`, and build this rank's part of the model, without weights."""
        raise NotImplementedError

    # Building

    def master_address(self) -> str:
        """An address on this rank's node for the ranks to meet at."""
        ip = ray.util.get_node_ip_address()
        return host_port(ip, free_ports(1, ip)[0])

    def init(self, master: str) -> None:
        """Join the other ranks, build the model, and load the checkpoint of --load, else --hf-checkpoint's weights."""
        config = self.config
        self.model = self._build_model(master)
        # While a trainer sleeps, its other groups may be away; and on a GPU their communicators are for what is large.
        self.agreement = Agreement(dist.new_group(backend="gloo", timeout=timeout(config)))
        self._load_weights()
        self.model.build_optimizer(self._continued_config(), self._total_steps())
        self._load_checkpoint()
        self.trainer = ShardTrainer(self.model, self._loss())
        self.model.begin(self.agreement)
        if config.offload_train:
            self.residency = build_residency(config, self.rank, self.model, self.party)

    # What actor and critic do each in its own way

    def _load_weights(self) -> None:
        """Fill the model from Hugging Face folders."""
        raise NotImplementedError

    def _total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        raise NotImplementedError

    def _loss(self) -> ScoreFunction:
        """From the model's scores of a micro-batch to its loss."""
        raise NotImplementedError

    # Loading

    def _loaded_folder(self) -> Path | None:
        """The checkpoint that the run goes on from."""
        if self.config.load is None:
            return None
        assert self.config.ckpt_step is not None
        return locate(self.config.load, self.config.ckpt_step)

    def _continued_config(self) -> RunConfig:
        """With the optimizer's settings of the checkpoint where the user gave none."""
        folder = self._loaded_folder()
        if folder is None or self.config.no_load_optim:
            return self.config
        return checkpoint.continued_config(folder, self.model)

    def _load_checkpoint(self) -> None:
        config, folder = self.config, self._loaded_folder()
        if folder is not None:
            if self.reference is not None and not config.finetune and (folder / REFERENCE).exists():
                with self.reference.swapped_in():
                    self.model.load_weights(folder / REFERENCE)
                self.reference_moved = True
            checkpoint.load(
                folder,
                self.model,
                with_optimizer=not config.no_load_optim,
                with_random_state=not config.no_load_rng,
            )
            logger.info("continuing from %s", folder)
        if config.keep_old_actor:
            self.old_actor = HostWeights(self.model.weights, "--keep-old-actor")

    # Training, as far as actor and critic share it

    def _begin_training(self) -> None:
        if self.residency is not None:
            self.residency.wake_up()
        if self.config.reset_optimizer_states:
            self.model.reset_optimizer()

    def _stopwatch(self) -> Stopwatch:
        """Its phases end when the GPU has done its work."""
        return Stopwatch(torch.cuda.synchronize if self.config.device == "cuda" else None)

    def _step_metrics(self, steps: list[dict[str, float]], watch: Stopwatch) -> dict[str, float]:
        """What the rank that reports says about the optimizer steps of a rollout; {} on the others."""
        if not self.model.grid.reports:
            return {}
        return step_metrics.of_rollout(steps) | {"train/step": float(self.model.num_steps)} | watch.metrics

    # Weights of others

    def connect(self, engines: list[EngineTarget]) -> None:
        """Prepare to send weights to `engines`."""
        config = self.config
        trainer = TrainerRank(self.rank, self.agreement, ray.util.get_node_ip_address(), timeout(config))
        settings = SyncSettings(
            checkpoint_folder=config.hf_checkpoint,
            buffer_size=config.update_weight_buffer_size,
            # A released cache was flushed before its memory went, and must not be touched.
            flush_cache=not (config.offload_rollout and "kv_cache" in config.offload_rollout_level),
            pause_mode=config.pause_generation_mode,
            transfer_mode=config.update_weight_transfer_mode,
            disk_folder=config.update_weight_disk_dir,
            check_equal=config.check_weight_update_equal,
        )
        weights = self.model.weight_source(self._read_weight, copies=self.residency is not None)
        engine_format = Fp8Format(fp8_weights(weights.index)) if config.rollout_fp8 else None
        self.updater = WeightUpdater(weights, engines, trainer, settings, engine_format)

    def _read_weight(self, weight: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """The values of a parameter or a buffer, or of one expert's part, awake or asleep."""
        return live(weight, expert) if self.residency is None else self.residency.read_weight(weight, expert)

    def update_weights(self, version: int) -> dict[str, float]:
        """Send the weights to the engines as `version`, awake or asleep; metrics on rank 0."""
        assert self.updater is not None
        metrics = self.updater.update(version)
        if self.old_actor is not None:
            self.old_actor.take(self._read_weight)
        return metrics if self.rank == 0 else {}

    def disconnect(self) -> None:
        """After the last `update_weights`: leave nothing of it in the engines, which may live on."""
        assert self.updater is not None
        self.updater.close()

    def save(self, rollout_id: int) -> None:
        """Write this rank's part of the checkpoint of `rollout_id`, awake or asleep."""
        root = self.config.save
        assert root is not None
        with self._awake():
            with_optimizer = not self.config.no_save_optim
            checkpoint.save(root, rollout_id, self.model, with_optimizer, self.agreement)
            if self.reference is not None and self.reference_moved:
                with self.reference.swapped_in():
                    folder = partial_folder(root, rollout_id) / REFERENCE
                    checkpoint.save_weights(folder, self.model, self.agreement)
            empty_caches(torch.device(self.config.device))  # the writer's pinned buffers are as large as the state

    def export_hf(self, rollout_id: int) -> None:
        """Write the weights as a Hugging Face checkpoint to the folder that --save-hf names, awake or asleep."""
        assert self.config.save_hf is not None
        folder = self.config.save_hf.format(rollout_id=rollout_id)
        with self._awake(), writing("--save-hf", folder):
            weights = self.model.weight_source(live, copies=False)
            save_hf(folder, weights, is_writer=self.rank == 0, agreement=self.agreement)

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
        self.model.drop_workspaces()
        empty_caches(torch.device(self.config.device))
        return {"perf/clear_memory_time": time.perf_counter() - started}

    def _residency(self) -> TrainerResidency:
        if self.residency is None:
            raise UserError("the trainer's memory can only move with --offload-train, which is off")
        return self.residency

    def _awake(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.residency is None else self.residency.awake()
