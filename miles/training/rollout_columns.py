"""From what forward passes say about a rollout's tokens to the columns that the loss reads, on the CPU.

Shapes: n response tokens of a rank's shard, flat, masked ones included.
"""

from collections.abc import Callable, Mapping

import torch

from miles.config import RunConfig
from miles.training.advantages import AdvantageInputs, Advantages
from miles.training.advantages.estimator import compute_advantages
from miles.training.advantages.responses import Responses
from miles.training.advantages.whitening import whiten
from miles.training.batch import TrainBatch
from miles.training.losses import kl_estimate

Columns = Mapping[str, torch.Tensor]


def advantages_of(config: RunConfig, batch: TrainBatch, columns: Columns) -> Advantages:
    """Advantages and returns of the shard's tokens as --advantage-estimator has them.

    Args:
        batch: the shard's, with the column `rewards`.
        columns: float32 [n] each: `values` with a critic, `ref_log_probs` with --kl-coef, and then `old_log_probs`
            unless the batch's `rollout_log_probs` stand for them.
    """
    kl = None
    if config.kl_coef:
        kl = kl_estimate(_policy_log_probs(batch, columns), columns["ref_log_probs"], config.kl_loss_type)
    inputs = AdvantageInputs(
        # Copies: what comes out of Ray's store is not writable.
        Responses(torch.tensor(batch.response_offsets), trainable(batch)),
        torch.tensor(batch["rewards"]),
        kl=kl,
        kl_coef=config.kl_coef,
        values=columns.get("values"),
        gamma=config.gamma,
        lambd=config.lambd,
    )
    return compute_advantages(config.estimator, inputs)


def trained_columns(
    config: RunConfig, batch: TrainBatch, columns: Columns, all_reduce: Callable[[torch.Tensor], None]
) -> dict[str, torch.Tensor]:
    """`advantages` as the loss reads them, 0 at masked tokens, and what they come from: `returns`, `opd_reverse_kl`.

    On-policy distillation (--use-opd) subtracts from an advantage --opd-kl-coef times the k1 estimate of
    KL(policy || teacher) at the token (https://thinkingmachines.ai/blog/on-policy-distillation), before whitening.

    Args:
        columns: as in `advantages_of`; `teacher_log_probs` with --use-opd, unless the batch has them.
        all_reduce: sums in place over the ranks that share the rollout out; all of them must make this call.
    """
    advantages, returns = advantages_of(config, batch, columns)
    mask, found = trainable(batch), {}
    if config.use_opd:
        kl = kl_estimate(_policy_log_probs(batch, columns), _column(batch, columns, "teacher_log_probs"), "k1")
        found["opd_reverse_kl"] = torch.where(mask, kl, 0.0)
        advantages = advantages - config.opd_kl_coef * found["opd_reverse_kl"]
    if config.normalize_advantages:
        advantages = whiten(advantages, mask, all_reduce)
    found["advantages"] = advantages
    if returns is not None:
        found["returns"] = returns
    return found


def masked_means(batch: TrainBatch, columns: Columns, all_reduce: Callable[[torch.Tensor], None]) -> dict[str, float]:
    """The mean of each column over the rollout's trainable tokens on all ranks; {} if there are none.

    all_reduce: as in `trained_columns`; all ranks have the same columns.
    """
    mask = trainable(batch)
    sums = [mask.double().sum(), *(values[mask].double().sum() for values in columns.values())]
    total = torch.stack(sums)
    all_reduce(total)
    count, *totals = total.tolist()
    return {name: total / count for name, total in zip(columns, totals, strict=True)} if count else {}


def trainable(batch: TrainBatch) -> torch.Tensor:
    """Which response tokens are trained on: bool [n]."""
    return torch.from_numpy(batch["loss_masks"] > 0)


def _column(batch: TrainBatch, columns: Columns, name: str) -> torch.Tensor:
    """A column that was computed here, or that came with the batch."""
    return columns[name] if name in columns else torch.tensor(batch[name])


def _policy_log_probs(batch: TrainBatch, columns: Columns) -> torch.Tensor:
    """Of the policy before the optimizer steps, as far as it is known."""
    return columns["old_log_probs"] if "old_log_probs" in columns else torch.tensor(batch["rollout_log_probs"])
