"""Which sample is trained on in which step, on which data-parallel rank, in which micro-batch, and what it weighs."""

from dataclasses import dataclass

import numpy as np

from miles.config import RunConfig
from miles.hf.flops import checkpoint_flops
from miles.training.batch import TrainBatch, TrainRows
from miles.training.schedule_micro_batches import fixed_micro_batches, token_micro_batches
from miles.utils.errors import UserError


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step, for all data-parallel ranks.

    Args:
        rows: int64 [rows of the step]: which of the whole batch's the step trains on, ascending.
        micro_batches: [dp_rank][micro-batch] -> rows of the whole batch.
        num_micro_batches: of each rank. One with fewer in `micro_batches` gets so many more of `filler` alone.
        filler: the step's shortest row. As a filler it is masked and weighs nothing; only the balancing losses of
            experts see its tokens.
        token_weights: float32 [rows of the step]: the weight of an unmasked response token of each in the step's loss.
        metric_weights: the same, in the step's mean of a metric.
    """

    rows: np.ndarray
    micro_batches: list[list[list[int]]]
    num_micro_batches: int
    filler: int
    token_weights: np.ndarray
    metric_weights: np.ndarray


@dataclass(frozen=True)
class StepShard:
    """One optimizer step on one rank.

    Args:
        micro_batches: the rows of each, in the rank's own batch.
        weighs: whether any token of the whole step, on whichever rank, has a weight in its loss.
    """

    micro_batches: list[list[int]]
    weighs: bool


@dataclass(frozen=True)
class TrainShard:
    """What one data-parallel rank trains on in a rollout: its steps and its rows, fillers among them.

    `batch` has the columns `token_weights` and `metric_weights`.
    """

    batch: TrainBatch
    steps: list[StepShard]


def plan_for(config: RunConfig, batch: TrainRows) -> list[StepPlan]:
    """The steps of a rollout as `config` wants them: see `plan_rollout`."""
    costs = None
    if config.balance_by_flops:
        costs = checkpoint_flops(config.hf_checkpoint).of(batch.total_lengths, batch.response_lengths)
    elif config.balance_data:
        costs = batch.total_lengths
    assert config.global_batch_size is not None, "it is derived where it is not given"
    return plan_rollout(
        batch,
        global_batch_size=config.global_batch_size,
        dp_size=config.data_parallel_size,
        micro_batch_size=config.micro_batch_size,
        max_tokens=config.max_tokens_per_micro_batch,
        per_token_loss=config.calculate_per_token_loss,
        constant_length=config.constant_loss_length,
        least_micro_batches=config.least_micro_batches,
        costs=costs,
    )


def plan_rollout(
    batch: TrainRows,
    *,
    global_batch_size: int,
    dp_size: int,
    micro_batch_size: int,
    max_tokens: int | None,
    per_token_loss: bool,
    constant_length: int | None = None,
    least_micro_batches: int = 1,
    costs: np.ndarray | None = None,
) -> list[StepPlan]:
    """Cuts a rollout into optimizer steps of `global_batch_size` trajectories in order, and each into micro-batches.

    The last step takes what is left. Samples that share a `rollout_id` are one trajectory and stay in one step. Each
    data-parallel rank gets equally many rows of a step, or one more. Without `max_tokens` they are dealt in turn, or by
    `costs`, and cut into micro-batches of `micro_batch_size` (the last may be smaller). With it they are dealt dearest
    first to the rank with the least so far and packed first-fit-decreasing into micro-batches of at most `max_tokens`
    tokens. Micro-batches are then split, and fillers added where a rank has too few rows for that, until all ranks have
    equally many, and no fewer than `least_micro_batches`.

    Args:
        batch: the whole rollout.
        global_batch_size: trajectories a step.
        dp_size: data-parallel ranks.
        micro_batch_size: rows a micro-batch; unused with `max_tokens`.
        max_tokens: tokens a micro-batch, before padding; None for a fixed number of rows.
        per_token_loss: a step's mean is over its unmasked tokens; otherwise over its trajectories, each the mean of its
            unmasked tokens. A trajectory without any is not counted.
        constant_length: a trajectory's sum of losses is divided by this instead of its number of unmasked tokens; in
            the means of metrics it is not.
        least_micro_batches: of a step on each rank.
        costs: [rows] what each row costs, for dealing. None: its tokens with `max_tokens`, else not asked.

    Raises:
        ValueError: a sample is longer than `max_tokens`.
    """
    assert not (per_token_loss and constant_length)
    lengths = batch.total_lengths
    if max_tokens is not None and lengths.max() > max_tokens:
        raise UserError(
            f"{np.sum(lengths > max_tokens)} of {len(batch)} samples have more than {max_tokens} tokens, the longest "
            f"{lengths.max()}; raise --max-tokens-per-gpu to at least that, or lower --rollout-max-response-len"
        )
    trajectory = _trajectories(batch["rollout_ids"])
    step_of_row = trajectory // global_batch_size
    mask_sums = batch.mask_sums
    token_weights = metric_weights = _mean_weights(mask_sums, trajectory, step_of_row, per_token_loss, None)
    if constant_length is not None:
        token_weights = _mean_weights(mask_sums, trajectory, step_of_row, per_token_loss, constant_length)
    by_step = np.argsort(step_of_row, kind="stable")
    plans = []
    for rows in np.split(by_step, np.cumsum(np.bincount(step_of_row))[:-1]):
        costs_ = None if costs is None else costs[rows].tolist()
        if max_tokens is None:
            places = fixed_micro_batches(len(rows), dp_size, micro_batch_size, least_micro_batches, costs_)
        else:
            places = token_micro_batches(lengths[rows].tolist(), dp_size, max_tokens, least_micro_batches, costs_)
        row_at = rows.tolist()
        micro_batches = [[[row_at[place] for place in part] for part in rank] for rank in places]
        plans.append(
            StepPlan(
                rows=rows,
                micro_batches=micro_batches,
                num_micro_batches=max(least_micro_batches, *map(len, micro_batches)),
                filler=int(rows[lengths[rows].argmin()]),
                token_weights=token_weights[rows],
                metric_weights=metric_weights[rows],
            )
        )
    _check(plans, len(batch))
    return plans


def shard(batch: TrainRows, plan: list[StepPlan], dp_rank: int) -> TrainShard:
    """The rows and steps of one data-parallel rank. Its rows are stored in the order in which they are trained on."""
    rows: list[int] = []
    fillers: list[int] = []
    steps: list[StepShard] = []
    token_weights, metric_weights = np.zeros(len(batch), np.float32), np.zeros(len(batch), np.float32)
    for step in plan:
        token_weights[step.rows], metric_weights[step.rows] = step.token_weights, step.metric_weights
        parts = step.micro_batches[dp_rank]
        missing = step.num_micro_batches - len(parts)
        ends = np.cumsum([len(rows), *map(len, parts), *[1] * missing]).tolist()
        micro_batches = [list(range(start, end)) for start, end in zip(ends, ends[1:], strict=False)]
        steps.append(StepShard(micro_batches, weighs=bool(step.token_weights.any())))
        for part in parts:
            rows.extend(part)
        fillers.extend(range(len(rows), len(rows) + missing))
        rows.extend([step.filler] * missing)
    mine = batch.select(rows)
    real = np.ones(len(rows), dtype=bool)
    real[fillers] = False
    columns = {
        "loss_masks": mine["loss_masks"] * np.repeat(real, mine.response_lengths),
        "token_weights": token_weights[rows] * real,
        "metric_weights": metric_weights[rows] * real,
    }
    return TrainShard(mine.with_columns(**columns), steps)


def _trajectories(rollout_ids: np.ndarray) -> np.ndarray:
    """The number of each row's trajectory, from 0 in the order in which they first appear."""
    _, first, trajectory = np.unique(rollout_ids, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[trajectory]


def _mean_weights(
    mask_sums: np.ndarray,
    trajectory: np.ndarray,
    step_of_row: np.ndarray,
    per_token_loss: bool,
    constant_length: int | None,
) -> np.ndarray:
    """The weight of an unmasked token of each row in its step's mean: float32 [rows]. Where none is unmasked it is 0.

    Without `constant_length` the sum of weight * mask over a step is 1, or 0 if all of it is masked.
    """
    if per_token_loss:
        counts = np.bincount(step_of_row, mask_sums)[step_of_row]
    else:
        tokens = np.bincount(trajectory, mask_sums)
        step_of_trajectory = np.empty(len(tokens), dtype=np.int64)
        step_of_trajectory[trajectory] = step_of_row
        counted = np.bincount(step_of_trajectory, tokens > 0)
        counts = (tokens[trajectory] if constant_length is None else constant_length) * counted[step_of_row]
    weights = np.divide(1, counts, out=np.zeros(len(mask_sums)), where=mask_sums > 0)
    if constant_length is None:
        sums = np.bincount(step_of_row, weights * mask_sums)
        assert np.allclose(sums, np.bincount(step_of_row, mask_sums) > 0, rtol=1e-9)
    return weights.astype(np.float32)


def _check(plans: list[StepPlan], num_rows: int) -> None:
    micro_batches = [part for plan in plans for rank in plan.micro_batches for part in rank]
    used = np.fromiter((row for part in micro_batches for row in part), dtype=np.int64)
    assert np.array_equal(np.sort(used), np.arange(num_rows)), "a plan must use every sample exactly once"
    assert all(micro_batches), "a micro-batch holds at least one sample"
    for plan in plans:
        assert all(len(rank) <= plan.num_micro_batches for rank in plan.micro_batches)
