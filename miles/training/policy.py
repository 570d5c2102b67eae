"""The loss of a micro-batch and its metrics, ready to be added up.

Everything returned is a sum with the weights of the whole step (`PackedBatch.weight_N`): adding up the losses,
gradients or metrics of all micro-batches and data-parallel ranks gives the step's mean; nothing is left to divide by.
"""

import torch

from miles.training.advantages import grpo_advantages
from miles.training.losses import kl_estimate, policy_loss, sft_loss, weighted_sum
from miles.training.packing import PackedBatch


def compute_policy_loss(
    log_probs_N: torch.Tensor,
    entropy_N: torch.Tensor,
    packed: PackedBatch,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None,
    entropy_coef: float,
    use_kl_loss: bool,
    kl_loss_coef: float,
    kl_loss_type: str,
    use_rollout_logprobs: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped policy loss - entropy_coef * entropy + kl_loss_coef * KL to the reference.

    Args:
        log_probs_N: log-probabilities under the model in training.
        entropy_N: entropy at each response token; needs a gradient only if `entropy_coef` isn't 0.
        packed: the micro-batch. Its columns: `rollout_log_probs`; `old_log_probs` unless `use_rollout_logprobs`;
            `ref_log_probs` with `use_kl_loss`. Its sample column `rewards` holds the normalised rewards.
        eps_clip, eps_clip_high, eps_clip_c: see `policy_loss`.
        entropy_coef: weight of the entropy.
        use_kl_loss, kl_loss_coef, kl_loss_type: the KL term, its weight, and its estimator (`kl_estimate`).
        use_rollout_logprobs: the ratio's denominator is the engine's log-probability instead of the trainer's own.

    Returns:
        The loss, a scalar with gradient, and detached scalars by metric name; equal arguments give equal names.
    """
    mask_N, weight_N = packed.mask_N, packed.weight_N

    def select(x_N: torch.Tensor) -> torch.Tensor:
        # Before any arithmetic: a gradient of zero that passes through exp(inf) would come out as NaN.
        return torch.where(mask_N, x_N, 0.0)

    log_probs_N, entropy_N = select(log_probs_N), select(entropy_N)
    rollout_N = select(packed.columns["rollout_log_probs"])
    old_N = rollout_N if use_rollout_logprobs else select(packed.columns["old_log_probs"])
    adv_N = grpo_advantages(packed.sample_columns["rewards"], packed.sample_N)

    policy = policy_loss(
        log_probs_N, old_N, adv_N, eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_c=eps_clip_c
    )
    pg_loss = weighted_sum(policy.loss_N, weight_N)
    entropy = weighted_sum(entropy_N, weight_N)
    loss = pg_loss - entropy_coef * entropy if entropy_coef else pg_loss
    # The trainer's view of the very weights that the engine sampled with, as far as it is known.
    trainer_N = log_probs_N.detach() if use_rollout_logprobs else old_N
    metrics = {
        "train/pg_loss": pg_loss,
        "train/entropy_loss": entropy,
        "train/pg_clipfrac": weighted_sum(policy.clipfrac_N, weight_N),
        "train/ppo_kl": weighted_sum(policy.ppo_kl_N, weight_N),
        "train/train_rollout_logprob_abs_diff": weighted_sum((trainer_N - rollout_N).abs(), weight_N),
        "train/train_rollout_kl": weighted_sum(kl_estimate(rollout_N, trainer_N, "low_var_kl"), weight_N),
    }
    if use_kl_loss:
        ref_N = select(packed.columns["ref_log_probs"])
        kl_loss = weighted_sum(kl_estimate(log_probs_N, ref_N, kl_loss_type), weight_N)
        loss = loss + kl_loss_coef * kl_loss
        metrics["train/kl_loss"] = kl_loss
    metrics["train/loss"] = loss
    return loss, {name: value.detach() for name, value in metrics.items()}


def compute_sft_loss(log_probs_N: torch.Tensor, packed: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of the unmasked response tokens; returned like `compute_policy_loss`."""
    loss = weighted_sum(sft_loss(log_probs_N), packed.weight_N)
    return loss, {"train/loss": loss.detach()}
