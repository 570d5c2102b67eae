"""Do engine and trainer hold the same model? What the first rollout says."""

import logging

import numpy as np
import torch
import torch.distributed as dist

from miles.backends.trainer.protocol import ProcessGrid
from miles.config import RunConfig
from miles.training.batch import TrainBatch
from miles.utils.errors import UserError

logger = logging.getLogger(__name__)


def check_log_probs(
    grid: ProcessGrid, config: RunConfig, batch: TrainBatch, log_probs: torch.Tensor | None, rollout_id: int
) -> None:
    """Once, before any training: do engine and trainer hold the same model? All ranks raise, or none.

    What older weights wrote, as a resumed run may have, says nothing: it is left out.

    Args:
        grid: this rank's place.
        config: with the bound, --max-logprob-abs-diff.
        batch: the shard's, with the engine's `rollout_log_probs`.
        log_probs: the trainer's, on the last pipeline stage, else None.
        rollout_id: for the message.

    Raises:
        ValueError: they differ by more than the bound, on average.
    """
    total = torch.zeros(2, dtype=torch.float32, device=config.device)
    if log_probs is not None:
        compared = batch["loss_masks"] > 0
        if "stale" in batch:
            compared &= np.repeat(batch["stale"] == 0, batch.response_lengths)
        gaps = np.abs(log_probs.numpy() - batch["rollout_log_probs"])[compared]
        total = torch.tensor([gaps.sum(), len(gaps)], dtype=torch.float32, device=config.device)
        dist.all_reduce(total, group=grid.dp_group())
    dist.all_reduce(total, group=grid.pp_group())
    mean = (total[0] / total[1].clamp(min=1)).item()
    bound = config.max_logprob_abs_diff
    if not mean <= bound:
        raise UserError(
            f"after the first weight sync the trainer's and the engine's log-probabilities of rollout {rollout_id} "
            f"differ by {mean:.4g} on average, the bound is {bound:.4g} (--max-logprob-abs-diff): the two do not "
            "hold the same model; check --hf-checkpoint, precision and --sglang-* arguments"
        )
    if total[1] > 0:
        logger.info("trainer and engine log-probabilities differ by %.3g on average (bound %.3g)", mean, bound)
    else:
        logger.warning("rollout %d has no token of the newest weights: engine and trainer go unchecked", rollout_id)
