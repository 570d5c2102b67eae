"""Which sample is trained on in which step, on which data-parallel rank, in which micro-batch, and what it weighs."""

import heapq
from dataclasses import dataclass

import numpy as np

from miles.training.batch import TrainBatch


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step, for all data-parallel ranks.

    Args:
        start: first row of the step; the step trains on rows start .. start + global_batch_size - 1.
        micro_batches: [dp_rank][micro-batch] -> rows of the whole batch; every rank has equally many micro-batches.
        token_weights: float32 [global_batch_size]: the weight of an unmasked response token of each row in the step's
            mean.
    """

    start: int
    micro_batches: list[list[list[int]]]
    token_weights: np.ndarray


@dataclass(frozen=True)
class StepShard:
    """One optimizer step on one rank: the rows of each micro-batch, in the rank's own batch."""

    micro_batches: list[list[int]]


@dataclass(frozen=True)
class TrainShard:
    """What one data-parallel rank trains on in a rollout: its rows (with the column `token_weights`) and its steps."""

    batch: TrainBatch
    steps: list[StepShard]


def plan_rollout(
    batch: TrainBatch,
    *,
    global_batch_size: int,
    dp_size: int,
    micro_batch_size: int,
    max_tokens: int | None,
    per_token_loss: bool,
    least_micro_batches: int = 1,
) -> list[StepPlan]:
    """Cuts a rollout into optimizer steps of `global_batch_size` rows in order, and each step into micro-batches.

    Every data-parallel rank gets the same number of rows of a step. Without `max_tokens` they are dealt in turn and cut
    into micro-batches of `micro_batch_size` (the last may be smaller). With it they are dealt longest first to the rank
    with the fewest tokens and packed first-fit-decreasing into micro-batches of at most `max_tokens` tokens; the
    fullest are then split until all ranks have equally many, and no fewer than `least_micro_batches`.

    Args:
        batch: the whole rollout.
        global_batch_size: rows a step.
        dp_size: data-parallel ranks.
        micro_batch_size: rows a micro-batch; unused with `max_tokens`.
        max_tokens: tokens a micro-batch, before padding; None for a fixed number of rows.
        per_token_loss: a step's mean is over its unmasked tokens; otherwise over its samples, each the mean of its own.
        least_micro_batches: of a step on each rank.

    Raises:
        ValueError: the sizes don't divide, or a sample is longer than `max_tokens`.
    """
    if len(batch) % global_batch_size:
        raise ValueError(
            f"a rollout of {len(batch)} samples can't be cut into steps of {global_batch_size} (--global-batch-size): "
            f"{len(batch) % global_batch_size} would be left; choose a divisor of {len(batch)}"
        )
    if global_batch_size % dp_size:
        raise ValueError(
            f"a step of {global_batch_size} samples (--global-batch-size) can't be dealt equally to {dp_size} "
            f"data-parallel ranks; choose a multiple of {dp_size}"
        )
    if global_batch_size // dp_size < least_micro_batches:
        raise ValueError(
            f"a step of {global_batch_size} samples (--global-batch-size) on {dp_size} data-parallel ranks can't be "
            f"cut into {least_micro_batches} micro-batches a rank; choose at least {dp_size * least_micro_batches}"
        )
    lengths = batch.total_lengths
    if max_tokens is not None and lengths.max() > max_tokens:
        raise ValueError(
            f"{np.sum(lengths > max_tokens)} of {len(batch)} samples have more than {max_tokens} tokens, the longest "
            f"{lengths.max()}; raise --max-tokens-per-gpu to at least that, or lower --rollout-max-response-len"
        )
    mask_sums = batch.mask_sums
    plans = []
    for start in range(0, len(batch), global_batch_size):
        rows = slice(start, start + global_batch_size)
        if max_tokens is None:
            most = global_batch_size // dp_size // least_micro_batches
            micro_batches = _fixed_micro_batches(global_batch_size, dp_size, min(micro_batch_size, most))
        else:
            micro_batches = _token_micro_batches(lengths[rows].tolist(), dp_size, max_tokens, least_micro_batches)
        micro_batches = [[[start + row for row in rows_] for rows_ in rank] for rank in micro_batches]
        plans.append(StepPlan(start, micro_batches, _token_weights(mask_sums[rows], per_token_loss)))
    _check(plans, len(batch))
    return plans


def shard(batch: TrainBatch, plan: list[StepPlan], dp_rank: int) -> TrainShard:
    """The rows and steps of one data-parallel rank. Its rows are stored in the order in which they are trained on."""
    rows, steps = [], []
    for step in plan:
        micro_batches = []
        for micro_batch in step.micro_batches[dp_rank]:
            micro_batches.append(list(range(len(rows), len(rows) + len(micro_batch))))
            rows.extend(micro_batch)
        steps.append(StepShard(micro_batches))
    token_weights = np.concatenate([step.token_weights for step in plan])
    return TrainShard(batch.select(rows).with_columns(token_weights=token_weights[rows]), steps)


def _token_weights(mask_sums: np.ndarray, per_token_loss: bool) -> np.ndarray:
    """Weights with sum(weight * mask) = 1 over the step, or all zero if nothing in the step is unmasked."""
    weights = np.zeros(len(mask_sums), dtype=np.float64)
    counted = mask_sums > 0
    if counted.any():
        weights[counted] = 1 / mask_sums.sum() if per_token_loss else 1 / (mask_sums[counted] * counted.sum())
        assert np.isclose((weights * mask_sums).sum(), 1.0, rtol=1e-9)
    return weights.astype(np.float32)


def _fixed_micro_batches(num_rows: int, dp_size: int, micro_batch_size: int) -> list[list[list[int]]]:
    ranks = [list(range(rank, num_rows, dp_size)) for rank in range(dp_size)]
    return [[rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)] for rows in ranks]


def _token_micro_batches(lengths: list[int], dp_size: int, max_tokens: int, least: int) -> list[list[list[int]]]:
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    ranks = _deal(longest_first, lengths, dp_size)
    bins = [_first_fit(rows, lengths, max_tokens) for rows in ranks]
    # A rank holds as many rows as any other, so the largest count is within reach of all.
    count = max(least, *(len(rank) for rank in bins))
    return [[sorted(rows) for rows in _split(rank, lengths, count)] for rank in bins]


def _deal(longest_first: list[int], lengths: list[int], dp_size: int) -> list[list[int]]:
    """Each row goes to the rank with the fewest tokens that may still take a row; all end with equally many rows."""
    if dp_size == 1:
        return [longest_first]
    quota = len(longest_first) // dp_size
    ranks = [[] for _ in range(dp_size)]
    loads = [(0, rank) for rank in range(dp_size)]
    for row in longest_first:
        load, rank = heapq.heappop(loads)
        ranks[rank].append(row)
        if len(ranks[rank]) < quota:
            heapq.heappush(loads, (load + lengths[row], rank))
    return ranks


def _first_fit(rows: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Each row goes into the first bin with room. A tree of the largest room below each node finds it in log(bins)."""
    # Two bins of a first-fit packing hold more than max_tokens together, which bounds their number.
    most_bins = min(len(rows), 2 * sum(lengths[row] for row in rows) // max_tokens + 1)
    leaves = 1 << (most_bins - 1).bit_length()
    room = [max_tokens] * (2 * leaves)
    bins = [[] for _ in range(leaves)]
    for row in rows:
        length, node = lengths[row], 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        bins[node - leaves].append(row)
        room[node] -= length
        while node > 1:
            node //= 2
            largest = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest:
                break
            room[node] = largest
    return [rows_ for rows_ in bins if rows_]


def _split(bins: list[list[int]], lengths: list[int], count: int) -> list[list[int]]:
    """Halves the bin with the most tokens, among those of several rows, until there are `count` bins."""
    done = [rows for rows in bins if len(rows) == 1]
    heap = [(-sum(lengths[row] for row in rows), i, rows) for i, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    tiebreak = len(bins)
    while len(done) + len(heap) < count:
        _, _, rows = heapq.heappop(heap)
        # Rows are longest first, so dealing them to the lighter half balances the two.
        for half in _halves(rows, lengths):
            tiebreak += 1
            if len(half) == 1:
                done.append(half)
            else:
                heapq.heappush(heap, (-sum(lengths[row] for row in half), tiebreak, half))
    return done + [rows for _, _, rows in sorted(heap)]


def _halves(rows: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    halves, loads = ([], []), [0, 0]
    for row in rows:
        lighter = int(loads[1] < loads[0])
        halves[lighter].append(row)
        loads[lighter] += lengths[row]
    return halves


def _check(plans: list[StepPlan], num_rows: int) -> None:
    micro_batches = [rows for plan in plans for rank in plan.micro_batches for rows in rank]
    used = np.fromiter((row for rows in micro_batches for row in rows), dtype=np.int64)
    assert np.array_equal(np.sort(used), np.arange(num_rows)), "a plan must use every sample exactly once"
    for plan in plans:
        assert len({len(rank) for rank in plan.micro_batches}) == 1, "all ranks need the same number of micro-batches"
