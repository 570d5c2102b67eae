"""CriticRayActor: one rank of the critic, which estimates the reward to come before each response token."""

import functools
from pathlib import Path

import ray
import torch

from miles.backends.trainer.protocol import ScoreFunction
from miles.backends.trainer.rank import RankActor
from miles.residency.plan import Party
from miles.training.policy import compute_value_loss
from miles.training.rollout_columns import advantages_of
from miles.training.schedule import TrainShard
from miles.utils.errors import UserError


class CriticRayActor(RankActor):
    """Holds this rank's part of the critic and trains it, in the actor's layout.

    Args:
        config: the run's configuration as `miles.ray.train.group.critic_config` makes it.
        rank, world_size: this rank's place among the critic's ranks.
    """

    party = Party.CRITIC

    def _load_weights(self) -> None:
        """--hf-checkpoint's, but for the output layer."""
        self.model.load_hf(self.config.hf_checkpoint)

    def _loaded_folder(self) -> Path | None:
        folder = super()._loaded_folder()
        if folder is not None and not self.model.is_of_critic(folder):
            raise UserError(f"{folder} holds no critic: give --critic-load a folder that --critic-save wrote")
        return folder

    def _total_steps(self) -> int:
        assert self.config.num_rollout is not None
        return self.config.num_rollout * self.config.steps_per_rollout

    def _loss(self) -> ScoreFunction:
        return functools.partial(compute_value_loss, value_clip=self.config.value_clip)

    def train(self, rollout_id: int, shard: TrainShard) -> tuple[dict[str, float], ray.ObjectRef | None]:
        """Train on this data-parallel rank's shard.

        Returns:
            Metrics on one rank, {} on the others, and a reference to `values` of `train_values`; None where those are.
        """
        metrics, values = self.train_values(shard)
        return metrics, None if values is None else ray.put(values)

    def train_values(self, shard: TrainShard) -> tuple[dict[str, float], torch.Tensor | None]:
        """Train towards the returns of the shard's rewards, with the values that the critic had before.

        Returns:
            Metrics (critic-train/*, perf/*) on one rank, {} on the others; and on the last pipeline stage those values,
            of each response token of the shard: float32, flat, on the CPU. None elsewhere.
        """
        watch = self._stopwatch()
        columns: dict[str, torch.Tensor] = {}
        self._begin_training()
        with watch("values"):
            scores = self.trainer.scores(shard)
        if scores is not None:
            (columns["values"],) = scores
            returns = advantages_of(self.config, shard.batch, columns).returns
            assert returns is not None
            columns["returns"] = returns
        with watch("critic_train"):
            steps = self.trainer.train(shard, columns)
        metrics = self._step_metrics(steps, watch)
        return {_name_of_critic(name): value for name, value in metrics.items()}, columns.get("values")


def _name_of_critic(metric: str) -> str:
    """`train/...` is the actor's."""
    return f"critic-{metric}" if metric.startswith("train/") else metric
