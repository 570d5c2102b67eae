"""Forward and training passes of one rank over its shard of a rollout.

Every loss and metric is a sum with weights that add up to one over the whole step (see miles/training/schedule.py), so
micro-batches, data-parallel and context-parallel ranks and their gradients are only ever added.
"""

import torch

from miles.backends.trainer import step_metrics
from miles.backends.trainer.context_parallel import combined
from miles.backends.trainer.guarded_steps import GuardedSteps
from miles.backends.trainer.protocol import ScoreFunction, TrainedModel
from miles.training.packing import PackedBatch, pack
from miles.training.policy import make_loss
from miles.training.sample_sums import sum_over
from miles.training.schedule import StepShard, TrainShard


class ShardTrainer:
    """Runs the passes that a rollout needs on one rank's model.

    Args:
        model: this rank's part of what is trained.
        loss: from the model's scores of a micro-batch to its loss and metrics.
    """

    def __init__(self, model: TrainedModel, loss: ScoreFunction):
        self.model = model
        self.config = model.config
        self.optimizer_step = GuardedSteps(self.config.max_nonfinite_steps)
        self._loss = loss

    def log_probs(self, shard: TrainShard) -> torch.Tensor | None:
        """Log-probability of each response token of the shard under the weights there are: the first of `scores`."""
        scores = self.scores(shard)
        return None if scores is None else scores[0]

    def scores(self, shard: TrainShard) -> tuple[torch.Tensor, ...] | None:
        """The model's scores of each response token of the shard, without gradients: float32, flat, on the CPU.

        The same on all context-parallel ranks; None on all but the last pipeline stage.
        """

        def collect(*arguments) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            *scores, _ = arguments
            return scores[0].sum() * 0, {"scores": torch.stack(scores).cpu()}

        # Known once the first micro-batch is through, and on the last stage only.
        result: torch.Tensor | None = None
        with torch.no_grad():
            for step in shard.steps:
                micro_batches = [self._pack(shard, rows, {}) for rows in step.micro_batches]
                collected = self.model.run(micro_batches, collect, forward_only=True)
                for packed, found in zip(micro_batches, collected, strict=bool(collected)):
                    if result is None:
                        size = int(shard.batch.response_offsets[-1])
                        result = torch.full((len(found["scores"]), size), torch.nan)
                    result[:, packed.response_index_N] = found["scores"]
        if not self.model.grid.is_last_stage:
            return None
        assert result is not None, "a shard has a step, and a step a micro-batch"
        result = combined(result, self.model.grid.cp_group(), self.config.device)
        assert not result.isnan().any(), "the forward pass left response tokens without a score, or made NaN"
        return result.unbind()

    def train(self, shard: TrainShard, columns: dict[str, torch.Tensor]) -> list[dict[str, float]]:
        """Take the shard's optimizer steps; returns the metrics of each step (empty dicts off the last pipeline stage).

        Args:
            columns: flat per-response-token tensors that the loss reads beside the shard's own: `old_log_probs`, and
                `ref_log_probs` with a KL loss.

        Raises:
            FloatingPointError: the gradient norm was not finite, more often in a row than --max-nonfinite-steps.
        """
        metrics = [self._step(shard, step, columns) for step in shard.steps]
        self.model.end_steps()
        return metrics

    def _step(self, shard: TrainShard, step: StepShard, columns: dict[str, torch.Tensor]) -> dict[str, float]:
        micro_batches = [self._pack(shard, rows, columns) for rows in step.micro_batches]
        self.model.begin_step(micro_batches)
        collected = self.model.run(micro_batches, self._loss, forward_only=False)
        metrics = self.model.end_passes() | self.optimizer_step(self.model, step.weighs)
        if not collected:
            return {}
        return metrics | step_metrics.of_step(collected, self.model.grid.dp_cp_group())

    def _pack(self, shard: TrainShard, rows: list[int], columns: dict[str, torch.Tensor]) -> PackedBatch:
        grid = self.model.grid
        return pack(
            shard.batch, rows, self.model.pad_multiple, self.config.device, grid.cp_rank, grid.cp_size, **columns
        )


def policy_loss(model: TrainedModel) -> ScoreFunction:
    """The loss of --loss-type over an actor's scores; ValueError for a custom one that can't be used."""

    def sum_over_sequence(x: torch.Tensor) -> torch.Tensor:
        # The group is asked for when it is used: a sleep destroys it.
        all_reduce = sum_over(model.grid.cp_group())
        assert all_reduce is not None
        return all_reduce(x)

    return make_loss(model.config, None if model.grid.cp_size == 1 else sum_over_sequence)
