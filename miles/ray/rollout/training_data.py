"""From the groups of a rollout to what trainer and report get of it: shards and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from miles.config import RunConfig
from miles.rollout.hooks import Hooks
from miles.rollout.metrics import rollout_metrics
from miles.rollout.train_data import check_log_probs
from miles.training.batch import TrainRows
from miles.training.schedule import plan_for, shard
from miles.utils.types import Sample


@dataclass(frozen=True)
class RolloutResult:
    """One rollout: a reference to the `TrainShard` of each data-parallel rank, and the metrics."""

    shards: list[ray.ObjectRef]
    metrics: dict[str, float]


def training_data(
    config: RunConfig,
    hooks: Hooks,
    rollout_id: int,
    groups: Sequence[Sequence[Sample]],
    version: int | None,
    known: Mapping[str, float],
    seconds: float,
) -> RolloutResult:
    """Shape the rewards of `groups`, which are trained on, and cut their samples into shards.

    Args:
        version: of the engines' weights; None: unknown.
        known: metrics of how they came about; go along.
        seconds: how long that took.

    Raises:
        RuntimeError: these are not all samples of a rollout, or some are not finished.
        ValueError: what a hook returned, or what can't be trained on.
    """
    samples = [sample for group in groups for sample in group]
    check_complete(samples, config.samples_per_rollout)
    raw, rewards = hooks.shape_rewards(config, samples) if config.learns_from_samples else (None, None)
    metrics = rollout_metrics(samples, rewards if config.has_reward else None, raw) | dict(known)
    if hooks.log_rollout(config, rollout_id, samples, metrics, seconds):
        # The step line and the times of a run need none of these.
        metrics = {name: value for name, value in metrics.items() if not name.startswith("rollout/")}
    if rewards is not None:
        check_log_probs(samples)
    batch = hooks.make_batch(config, samples, raw, rewards)
    stale = {sample.trajectory for sample in samples if _is_stale(sample, version)}
    if stale:
        # By trajectory: a convert hook may make other rows of one.
        batch = batch.with_columns(stale=[rollout in stale for rollout in batch["rollout_ids"].tolist()])
    return RolloutResult(_shards(config, batch), metrics)


def _is_stale(sample: Sample, version: int | None) -> bool:
    """Whether other weights than those of `version` wrote some of it."""
    return version is not None and any(own != str(version) for own in sample.weight_versions)


def _shards(config: RunConfig, batch: TrainRows) -> list[ray.ObjectRef]:
    if not config.needs_trainer:
        return []
    plan = plan_for(config, batch)
    return [ray.put(shard(batch, plan, rank)) for rank in range(config.data_parallel_size)]


def check_complete(samples: Sequence[Sample], asked: int) -> None:
    """Raise unless exactly the rollouts that were asked for have come back, each whole, in one or more pieces."""
    rollouts = len({sample.trajectory for sample in samples})
    whole = [sample.index for sample in samples if sample.rollout_id is None]
    if rollouts != asked or len(set(whole)) != len(whole) or len({id(sample) for sample in samples}) != len(samples):
        raise RuntimeError(
            f"asked for {asked} rollouts, got {rollouts} in {len(samples)} samples, of which "
            f"{len(samples) - len(whole)} are pieces and {len(whole) - len(set(whole))} came twice"
        )
    unfinished = {sample.index: sample.status.value for sample in samples if not sample.is_finished}
    if unfinished:
        raise RuntimeError(
            f"{len(unfinished)} of {len(samples)} samples are not finished: {dict(list(unfinished.items())[:10])}"
        )
