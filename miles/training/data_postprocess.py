"""`--rollout-data-postprocess-path`: a function of the user's own between the advantages and the optimizer steps.

    def postprocess(config, rollout_id, batch, columns):
        return {"advantages": columns["advantages"].clamp(-2, 2)}

It is called once a rollout on every rank that computes losses, with that rank's part of the rollout:

- config: the run's `RunConfig`; rollout_id: which rollout.
- batch: `miles.training.batch.TrainBatch`, what came from the rollout: tokens, loss_masks, rewards, group_indices.
  It can't be changed: what a token weighs follows from it.
- columns: float32 [n] by name, a value a response token, flat as `batch.response_offsets` cuts them: `advantages`,
  `returns` of estimators that have them, `old_log_probs` and `entropy` (unless `--use-rollout-logprobs` or
  `--skip-actor-forward-only`), `ref_log_probs`, `teacher_log_probs`, `values`. They are copies, and may hold anything
  at masked tokens.

It returns the columns that the loss reads instead, by name, or None for no change. Ranks of one tensor- or
context-parallel group have the same part and must return the same.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from miles.config import RunConfig
from miles.training.batch import TrainBatch
from miles.training.rollout_columns import trainable
from miles.utils.dotted_path import load_function
from miles.utils.errors import UserError

FLAG = "--rollout-data-postprocess-path"


def load_data_postprocess(path: str) -> Callable[..., Any]:
    """The function at a dotted path; ValueError if it can't be imported or called as said above."""
    return load_function(FLAG, path, "config", "rollout_id", "batch", "columns")


def postprocessed(
    config: RunConfig, rollout_id: int, batch: TrainBatch, columns: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Those of `columns` that the function replaces; {} without one.

    Raises:
        ValueError: it returned no dict, a column that was not there, or one of another size or with a value at a
            trainable token that is not finite.
    """
    if config.rollout_data_postprocess_path is None:
        return {}
    function = load_data_postprocess(config.rollout_data_postprocess_path)
    changed = function(config, rollout_id, batch, {name: values.clone() for name, values in columns.items()})
    if changed is None:
        return {}
    if not isinstance(changed, Mapping):
        raise UserError(f"{FLAG} returned {type(changed).__name__}; it must return None or a dict of columns")
    mask = trainable(batch)
    for name, values in changed.items():
        if name not in columns:
            raise UserError(f"{FLAG} returned {name!r}; it may return {', '.join(columns)}")
        if not isinstance(values, torch.Tensor) or values.shape != columns[name].shape:
            got = f"of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
            raise UserError(f"{FLAG} returned {name} {got}; it must be a tensor of {tuple(columns[name].shape)}")
        if not values[mask].isfinite().all():
            raise UserError(f"{FLAG} returned {name} with values at trainable tokens that are not finite")
    return {name: values.detach().to(columns[name]) for name, values in changed.items()}
