"""Sums, means and extremes of metrics, on one rank and on two."""

import math
import sys

import pytest
import torch

from miles.backends.trainer import step_metrics


def scalars(**values):
    return {f"train/{name}": torch.tensor(value) for name, value in values.items()}


# Of two ranks with two micro-batches each; the second rank's first has no trainable token.
COLLECTED = [
    [scalars(loss=0.25, ratio_max=1.5, ratio_min=0.5), scalars(loss=0.5, ratio_max=1.25, ratio_min=0.75)],
    [scalars(loss=0.0, ratio_max=-math.inf, ratio_min=math.inf), scalars(loss=-1.0, ratio_max=-3.0, ratio_min=-4.0)],
]


def test_of_step(run_ranks):
    run_ranks(__file__, 2)


def step(skipped=0.0, **values):
    return {f"train/{name}": value for name, value in values.items()} | {"train/skipped_steps": skipped}


def test_of_rollout():
    steps = [step(loss=1.0, ratio_max=3.0, ratio_min=0.5), step(loss=2.0, ratio_max=2.0, ratio_min=0.25)]
    assert step_metrics.of_rollout(steps) == {
        "train/loss": 1.5,
        "train/ratio_max": 3.0,
        "train/ratio_min": 0.25,
        "train/skipped_steps": 0.0,
    }


def test_a_skipped_step_is_counted_and_in_no_mean():
    steps = [step(loss=1.0, grad_norm=2.0), step(1.0, loss=math.nan, grad_norm=math.inf), step(loss=2.0, grad_norm=4.0)]
    found = step_metrics.of_rollout(steps)
    assert found == {"train/loss": 1.5, "train/grad_norm": 3.0, "train/skipped_steps": 1.0}
    # Where nothing else is left it shows what happened.
    found = step_metrics.of_rollout(steps[1:2])
    assert math.isnan(found["train/loss"]) and found["train/skipped_steps"] == 1.0


@pytest.mark.parametrize("empty", [0, 1])
def test_an_extreme_of_nothing_is_none(empty):
    nothing = step(loss=0.0, ratio_max=-math.inf, ratio_min=math.inf)
    steps = [step(loss=2.0, ratio_max=1.5, ratio_min=0.5)] * 2
    steps[empty] = nothing
    found = step_metrics.of_rollout(steps)
    assert (found["train/ratio_max"], found["train/ratio_min"]) == (1.5, 0.5)
    assert step_metrics.of_rollout([nothing]) == {"train/loss": 0.0, "train/skipped_steps": 0.0}
    # An extreme that is infinite stays one.
    assert step_metrics.of_rollout([step(ratio_max=math.inf)])["train/ratio_max"] == math.inf


def main(rank, world_size, store):
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    found = step_metrics.of_step(COLLECTED[rank], torch.distributed.group.WORLD)
    assert found == {"train/loss": -0.25, "train/ratio_max": 1.5, "train/ratio_min": -4.0}, found
    without = [{"train/loss": metrics["train/loss"]} for metrics in COLLECTED[rank]]
    assert step_metrics.of_step(without, torch.distributed.group.WORLD) == {"train/loss": -0.25}
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
