"""From the metrics of micro-batches to those of a step, and of a rollout.

A metric is a share of the step's mean, to be added up; one whose name ends in `_max` or `_min` is an extreme, and is
-inf or inf where there is nothing to take it of.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

# The extremes of nothing.
_NOTHING = {"_max": -math.inf, "_min": math.inf}


def of_step(collected: Sequence[dict[str, torch.Tensor]], group: dist.ProcessGroup) -> dict[str, float]:
    """Brings together what the micro-batches of one step collected, on all ranks of `group`.

    Args:
        collected: scalars by name; the names are the same in all micro-batches and on all ranks.
        group: the ranks that have the step's tokens once together.
    """
    names = sorted(collected[0])
    summed = [name for name in names if not _is_extreme(name)]
    extremes = [name for name in names if _is_extreme(name)]
    result: dict[str, float] = {}
    if summed:
        zero = torch.tensor(0.0)
        totals = torch.stack([sum((metrics[name].float() for metrics in collected), zero) for name in summed])
        dist.all_reduce(totals, group=group)
        result |= zip(summed, totals.tolist(), strict=True)
    if extremes:
        greatest = torch.stack([torch.stack([metrics[name].float() for name in extremes]) for metrics in collected])
        # The least is the greatest of the negatives.
        signs = torch.tensor([-1.0 if name.endswith("_min") else 1.0 for name in extremes], device=greatest.device)
        greatest = (greatest * signs).amax(dim=0)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
        result |= zip(extremes, (greatest * signs).tolist(), strict=True)
    return result


def of_rollout(steps: Iterable[dict[str, float]]) -> dict[str, float]:
    """Metrics of a rollout from those of its steps: means, extremes, and the number of steps that were skipped.

    A skipped step is in none of the others as long as one was taken: its metrics are hardly numbers.
    """
    steps = list(steps)
    skipped = sum(step["train/skipped_steps"] for step in steps)
    counted = [step for step in steps if not step["train/skipped_steps"]] or steps
    result = {}
    for name in counted[0]:
        values = [step[name] for step in counted]
        if name.endswith("_max"):
            result[name] = max(values)
        elif name.endswith("_min"):
            result[name] = min(values)
        else:
            result[name] = sum(values) / len(values)
    # No token was trained on: there is no extreme.
    empty = [name for name, value in result.items() if _is_extreme(name) and value == _NOTHING[name[-4:]]]
    return {name: value for name, value in result.items() if name not in empty} | {"train/skipped_steps": skipped}


def _is_extreme(name: str) -> bool:
    return name[-4:] in _NOTHING
