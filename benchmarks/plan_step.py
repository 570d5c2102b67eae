"""Seconds to plan the optimizer steps of a million samples, and how well they are balanced; CPU only.

    python benchmarks/plan_step.py [--samples 1000000] [--json PATH]
    python benchmarks/plan_step.py --shards [--samples 8192] [--tokens 32768] [--json PATH]

The samples have 64 to 32,768 tokens, log-normally distributed around 1,000. Each case plans all of them, in one step or
in steps of 4,096: in turn or by tokens into micro-batches of eight samples, or into micro-batches of at most 65,536
tokens (--use-dynamic-batch-size), dealt by tokens or by the work of a Qwen3 of 4B parameters (--balance-by-flops). With
siblings four samples are one trajectory. Planning is RolloutManager's work between generation and training.

Columns: micro-batches (parts) of each rank in a step; the share of their tokens that is used; tokens and work of each
step's busiest rank against the mean.

With --shards: seconds from finished samples, of --tokens each, to the shards of 8 and of 64 ranks, one made after the
other as they go to Ray's store, and the most memory that this process had, the samples and Python's modules included.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import ROOT, Row, parser, report
from sleep_wake import write_checkpoint_config

sys.path.insert(0, str(ROOT))

from miles.hf.flops import ForwardFlops, checkpoint_flops  # noqa: E402
from miles.training.batch import TrainRows  # noqa: E402
from miles.training.schedule import StepPlan, plan_rollout, shard  # noqa: E402
from miles.utils.types import Sample  # noqa: E402

MAX_TOKENS = 65536
STEP = 4096
SIBLINGS = 4
PROMPT = 1024
WAYS = ("in turn", "balance-data", "dynamic", "dynamic, flops", "dynamic, siblings")
# (how, samples a step or None for all, data-parallel ranks)
CASES = [
    *((way, None, 8) for way in WAYS),
    *((way, None, 1024) for way in WAYS),
    *((way, STEP, 64) for way in WAYS),
]


def make_batch(samples: int, siblings: int) -> TrainRows:
    """A rollout of these lengths. Only they and the masks are read: the values of a column are one value's views."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(1000), 1.0, samples).astype(np.int64), 64, 32768)
    responses = lengths - 32
    rows = np.arange(samples)
    columns = {
        "tokens": [np.broadcast_to(np.int32(0), length) for length in lengths],
        "loss_masks": [np.broadcast_to(np.int8(1), length) for length in responses],
        "truncated": np.zeros(samples, dtype=np.int64),
        "sample_indices": rows,
        "group_indices": rows // 8,
        "rollout_ids": rows // siblings,
    }
    return TrainRows(columns, lengths, responses)


def spread(plans: list[StepPlan], costs: np.ndarray) -> float:
    """The cost of each step's busiest rank, for which the others wait, against the ranks' mean; all steps together."""
    loads = np.array([[sum(costs[rows].sum() for rows in rank) for rank in plan.micro_batches] for plan in plans])
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


def row_of(way: str, step: int | None, ranks: int, samples: int, flops: ForwardFlops) -> Row:
    siblings = SIBLINGS if "siblings" in way else 1
    batch = make_batch(samples, siblings)
    work = flops.of(batch.total_lengths, batch.response_lengths)
    dynamic = way.startswith("dynamic")
    costs = {"balance-data": batch.total_lengths, "dynamic, flops": work}.get(way)
    started = time.perf_counter()
    plans = plan_rollout(
        batch,
        global_batch_size=(step or samples) // siblings,
        dp_size=ranks,
        micro_batch_size=8,
        max_tokens=MAX_TOKENS if dynamic else None,
        per_token_loss=False,
        costs=costs,
    )
    seconds = time.perf_counter() - started
    micro_batches = ranks * sum(plan.num_micro_batches for plan in plans)
    return {
        "case": way,
        "steps": len(plans),
        "ranks": ranks,
        "seconds": seconds,
        "parts": max(plan.num_micro_batches for plan in plans),
        "used": float(batch.total_lengths.sum() / (micro_batches * MAX_TOKENS)) if dynamic else None,
        "tokens": spread(plans, batch.total_lengths),
        "work": spread(plans, work),
    }


def answered(samples: int, tokens: int) -> list[Sample]:
    """Finished samples of so many tokens each, as engines leave them: with ids, log-probabilities and a mask."""
    draw, response = np.random.default_rng(0), tokens - PROMPT
    return [
        Sample(
            index=index,
            group_index=index // 8,
            tokens=draw.integers(0, 150_000, tokens, dtype=np.int32),
            response_length=response,
            rollout_log_probs=-draw.random(response, dtype=np.float32),
            loss_mask=np.ones(response, np.int8),
            reward=float(index % 2),
            status=Sample.Status.COMPLETED,
        )
        for index in range(samples)
    ]


def shards_of(samples: list[Sample], ranks: int) -> Row:
    """What it takes to cut the samples into the shards of so many ranks."""
    started, used = time.perf_counter(), time.process_time()
    rows = TrainRows.from_samples(samples, [0.0] * len(samples))
    sizes = {"micro_batch_size": 1, "max_tokens": None, "per_token_loss": False}
    plans = plan_rollout(rows, global_batch_size=len(samples), dp_size=ranks, **sizes)
    tokens = sum(len(shard(rows, plans, rank).batch["tokens"]) for rank in range(ranks))
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    # Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"ranks": ranks, "tokens": tokens, "seconds": seconds, "CPU seconds": cpu, "peak GB": peak}


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--samples", type=int, help="of the rollout (default 1,000,000; with --shards 8,192)")
    cli.add_argument("--shards", action="store_true", help="measure cutting shards instead of planning")
    cli.add_argument("--tokens", type=int, default=32768, help="of each sample that is cut (default 32,768)")
    options = cli.parse_args()
    if options.shards:
        samples = answered(options.samples or 8192, options.tokens)
        rows = [shards_of(samples, ranks) for ranks in (64, 8)]
        report("From samples to shards", rows, {"samples": len(samples), "tokens": options.tokens}, options.json)
        return
    options.samples = options.samples or 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint_config(Path(folder), "4B")
        flops = checkpoint_flops(folder)
    rows = [row_of(*case, options.samples, flops) for case in CASES]
    lengths = make_batch(options.samples, 1).total_lengths
    notes = {"samples": options.samples, "tokens": int(lengths.sum()), "longest": int(lengths.max())}
    report("Planning optimizer steps", rows, notes | {"tokens a micro-batch": MAX_TOKENS}, options.json)


if __name__ == "__main__":
    main()
