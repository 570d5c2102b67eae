"""TrainRayActor: one rank of the trainer of the policy."""

import contextlib

import torch
import torch.distributed as dist

from miles.backends.trainer.host_weights import HostWeights
from miles.backends.trainer.log_prob_check import check_log_probs
from miles.backends.trainer.profiler import profiled
from miles.backends.trainer.protocol import ScoreFunction
from miles.backends.trainer.rank import RankActor
from miles.backends.trainer.shard_trainer import policy_loss
from miles.config import RunConfig
from miles.residency.plan import Party
from miles.training.data_postprocess import postprocessed
from miles.training.rollout_columns import masked_means, trained_columns
from miles.training.schedule import TrainShard
from miles.utils.stopwatch import Stopwatch
from miles.weight_sync.source import live


class TrainRayActor(RankActor):
    """Holds this rank's part of the policy and trains it. Arguments as for RankActor."""

    party = Party.ACTOR

    def __init__(self, config: RunConfig, rank: int, world_size: int):
        super().__init__(config, rank, world_size)
        self.teacher: HostWeights | None = None
        self.checked_log_probs = False

    def _load_weights(self) -> None:
        """Fill the model from Hugging Face folders: others' weights first, which are kept as copies, its own last."""
        config = self.config
        if config.needs_reference:
            assert config.ref_load is not None
            self.reference = self._load_other("--ref-load", config.ref_load)
        if config.opd_teacher_load is not None:
            self.teacher = self._load_other("--opd-teacher-load", config.opd_teacher_load)
        self.model.load_hf(config.hf_checkpoint)

    def _total_steps(self) -> int:
        config = self.config
        assert config.num_rollout is not None
        return (config.num_rollout - config.num_critic_only_steps) * config.steps_per_rollout

    def _loss(self) -> ScoreFunction:
        """From the model's scores of a micro-batch to its loss; ValueError for a custom one that can't be used."""
        return policy_loss(self.model)

    def _load_other(self, flag: str, folder: str) -> HostWeights:
        self.model.check_same_computation(flag, folder)
        self.model.load_hf(folder)
        return HostWeights(self.model.weights, f"{flag} {folder}")

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
        with profiled(self.config, "train_overall", rollout_id, self.rank):
            return self._train(rollout_id, shard, values)

    def _train(self, rollout_id: int, shard: TrainShard, values: torch.Tensor | None) -> dict[str, float]:
        config, watch = self.config, self._stopwatch()
        self._begin_training()
        columns: dict[str, torch.Tensor] = {}
        metrics: dict[str, float] = {}
        if config.loss_type != "sft_loss":
            columns = self._forward(rollout_id, shard, watch)
            if self.model.grid.is_last_stage:
                if values is not None:
                    columns["values"] = values
                columns |= trained_columns(config, shard.batch, columns, self._sum_over_rollout)
                columns |= postprocessed(config, rollout_id, shard.batch, columns)
                means = masked_means(shard.batch, columns, self._sum_over_rollout)
                metrics = {f"rollout/{name.removeprefix('old_')}": mean for name, mean in means.items()}
        with watch("actor_train"), profiled(config, "train_actor", rollout_id, self.rank):
            steps = self.trainer.train(shard, columns)
        if config.ref_update_interval is not None and (rollout_id + 1) % config.ref_update_interval == 0:
            assert self.reference is not None
            self.reference.take(live)
            self.reference_moved = True
        trained = self._step_metrics(steps, watch)
        return trained | metrics if trained else {}

    def _forward(self, rollout_id: int, shard: TrainShard, watch: Stopwatch) -> dict[str, torch.Tensor]:
        """The forward passes before the optimizer steps: flat columns on the last pipeline stage, {} elsewhere."""
        config, columns = self.config, {}

        def scores(name: str, weights: HostWeights | None) -> tuple[torch.Tensor, ...] | None:
            with watch(name), contextlib.nullcontext() if weights is None else weights.swapped_in():
                return self.trainer.scores(shard)

        for name, weights in (("ref_log_probs", self.reference), ("teacher_log_probs", self.teacher)):
            if weights is not None and (scored := scores(name, weights)) is not None:
                columns[name] = scored[0]
        spared = config.use_rollout_logprobs or config.skip_actor_forward_only
        if not spared or not self.checked_log_probs:
            with profiled(config, "train_log_probs", rollout_id, self.rank):
                scored = scores("log_probs", self.old_actor)
            if not self.checked_log_probs:
                log_probs = None if scored is None else scored[0]
                check_log_probs(self.model.grid, config, shard.batch, log_probs, rollout_id)
                self.checked_log_probs = True
            if scored is not None and not spared:
                columns["old_log_probs"], columns["entropy"] = scored
        return columns

    def _sum_over_rollout(self, sums: torch.Tensor) -> None:
        """Add up over the ranks that share the rollout out, in place; context-parallel ranks have the same tokens."""
        on_device = sums.to(self.config.device)
        dist.all_reduce(on_device, group=self.model.grid.dp_group())
        sums.copy_(on_device)
