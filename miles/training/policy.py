"""The loss of a micro-batch and its metrics, ready to be added up.

Losses are sums with the weights of the whole step (`PackedBatch.weight_N`): adding up the losses or gradients of all
micro-batches and ranks gives the step's mean; nothing is left to divide by. So are the metrics, with the weights of a
mean (`PackedBatch.metric_weight_N`), but for extremes: names that end in `_max` or `_min`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, assert_never

import torch

from miles.config import RunConfig
from miles.training.advantages import LossForm
from miles.training.corrections import (
    RejectionSettings,
    TisSettings,
    extremes,
    importance_weights,
    mismatch_metrics,
    off_policy_sequences,
    rejected,
)
from miles.training.custom import Metrics, load_custom_loss, load_custom_tis
from miles.training.losses import (
    PolicyTerm,
    bounded_exp,
    cispo_loss,
    clip_loss,
    kl_estimate,
    sequence_log_ratio,
    sft_loss,
    unbiased_kl,
    value_loss,
    weighted_sum,
)
from miles.training.packing import PackedBatch
from miles.training.sample_sums import AllReduce, SampleSums
from miles.utils.errors import UserError

# From the log-probability and the entropy [N] of a micro-batch's response tokens to its loss and metrics.
LossFunction = Callable[[torch.Tensor, torch.Tensor, PackedBatch], tuple[torch.Tensor, Metrics]]


@dataclass(frozen=True)
class PolicySettings:
    """All that the policy loss reads of a configuration.

    Args:
        form: that of the estimator: `clip_loss` of each token's ratio or of its sequence's, or `cispo_loss`.
        eps_clip, eps_clip_high, eps_clip_c: see `clip_loss`.
        entropy_coef: weight of the entropy.
        use_kl_loss, kl_loss_coef, kl_loss_type, use_unbiased_kl: the KL term, its weight, its estimator
            (`kl_estimate`), and whether it is `unbiased_kl`.
        old: where the denominator of the ratio comes from: the column `old_log_probs` (of the trainer before the
            update), the engine's `rollout_log_probs`, or the current log-probabilities, whose ratio is 1.
        opsm_delta: bound of `off_policy_sequences`; None: no such masking.
        tis: importance weights; None: none.
        custom_tis: takes their place (`miles.training.custom`), the configuration filled in.
        rejection: rejection sampling; None: none.
    """

    form: LossForm = "clip"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    entropy_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    use_unbiased_kl: bool = False
    old: Literal["trainer", "engine", "current"] = "trainer"
    opsm_delta: float | None = None
    tis: TisSettings | None = None
    custom_tis: Callable[..., tuple[torch.Tensor, Metrics]] | None = None
    rejection: RejectionSettings | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "PolicySettings":
        """The settings of a complete configuration; ValueError if its custom function can't be used."""
        old: Literal["trainer", "engine", "current"]
        old = "engine" if config.use_rollout_logprobs else "current" if config.skip_actor_forward_only else "trainer"
        assert config.eps_clip_high is not None, "it follows from --eps-clip"
        tis = TisSettings(config.tis_level, config.tis_mode, config.tis_clip_low, config.tis_clip)
        rejection = RejectionSettings(
            config.rs_level, config.rs_lower_bound, config.rs_upper_bound, config.rs_veto_threshold
        )
        path = config.custom_tis_function_path
        return cls(
            form=config.estimator.loss,
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip_high,
            eps_clip_c=config.eps_clip_c,
            entropy_coef=config.entropy_coef,
            use_kl_loss=config.use_kl_loss,
            kl_loss_coef=config.kl_loss_coef,
            kl_loss_type=config.kl_loss_type,
            use_unbiased_kl=config.use_unbiased_kl,
            old=old,
            opsm_delta=config.opsm_delta if config.use_opsm else None,
            tis=tis if config.use_tis else None,
            custom_tis=functools.partial(load_custom_tis(path), config) if path else None,
            rejection=rejection if config.use_rs else None,
        )


def make_loss(config: RunConfig, all_reduce: AllReduce | None) -> LossFunction:
    """The loss of `--loss-type`.

    Args:
        config: a complete configuration.
        all_reduce: adds up over the context-parallel ranks (`sum_over`); None where a rank has whole samples.

    Raises:
        ValueError: a custom function can't be used.
    """
    if config.loss_type == "sft_loss":
        return lambda log_probs_N, entropy_N, packed: compute_sft_loss(log_probs_N, packed)
    settings = PolicySettings.of(config)
    if config.loss_type == "custom_loss":
        assert config.custom_loss_function_path is not None, "--loss-type custom_loss has one"
        custom = functools.partial(load_custom_loss(config.custom_loss_function_path), config)
        return functools.partial(_compute_custom_loss, custom=custom, old=settings.old, all_reduce=all_reduce)
    return functools.partial(compute_policy_loss, settings=settings, all_reduce=all_reduce)


def compute_policy_loss(
    log_probs_N: torch.Tensor,
    entropy_N: torch.Tensor,
    packed: PackedBatch,
    settings: PolicySettings,
    all_reduce: AllReduce | None,
) -> tuple[torch.Tensor, Metrics]:
    """Policy loss, corrected - entropy_coef * entropy + kl_loss_coef * KL to the reference.

    Off-policy corrections weigh tokens of the policy loss, or leave them out: of its sum, not of the count that the sum
    is divided by, nor of entropy and KL.

    Args:
        log_probs_N: log-probabilities under the model in training.
        entropy_N: entropy at each response token; needs a gradient only if `entropy_coef` isn't 0.
        packed: the micro-batch. Its columns: `advantages` and `rollout_log_probs`; `old_log_probs` if that is what
            `settings.old` says; `ref_log_probs` with `use_kl_loss`.
        settings: the loss.
        all_reduce: adds up over the context-parallel ranks (`sum_over`); None where this rank has whole samples.

    Returns:
        The loss, a scalar with gradient, and detached scalars by metric name; equal settings give equal names.
        `train/loss` and `train/pg_loss` have the weights of the loss, which are those of the others unless the loss is
        divided by a constant length.
    """
    select = functools.partial(_select, packed)
    sums = SampleSums(packed, all_reduce)
    log_probs_N, entropy_N, adv_N = select(log_probs_N), select(entropy_N), select(packed.columns["advantages"])
    old_N, trainer_N, rollout_N = _compared(log_probs_N, packed, settings.old)
    log_ratio_N = log_probs_N - old_N
    term = _policy_term(log_probs_N, log_ratio_N, adv_N, settings, sums)
    weight_N, correction_metrics = _corrections(
        log_ratio_N.detach(), adv_N, trainer_N, rollout_N, packed, settings, sums
    )
    pg_loss_N = term.loss_N if weight_N is None else torch.where(weight_N == 0, 0.0, term.loss_N * weight_N)

    loss = pg_loss = weighted_sum(pg_loss_N, packed.weight_N)
    means = {"entropy_loss": entropy_N, "pg_clipfrac": term.clipped_N, "ppo_kl": -log_ratio_N}
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * weighted_sum(entropy_N, packed.weight_N)
    if settings.use_kl_loss:
        kl_N = kl_estimate(log_probs_N, select(packed.columns["ref_log_probs"]), settings.kl_loss_type)
        if settings.use_unbiased_kl:
            kl_N = unbiased_kl(kl_N, log_ratio_N)
        means["kl_loss"] = kl_N
        if settings.kl_loss_coef:
            loss = loss + settings.kl_loss_coef * weighted_sum(kl_N, packed.weight_N)
    with torch.no_grad():
        metrics = {"train/loss": loss, "train/pg_loss": pg_loss} | _weighted(means, packed)
        metrics |= extremes("train/ppo_ratio", term.ratio_N, packed)
        metrics |= _distances(log_ratio_N, trainer_N, rollout_N, packed, sums) | correction_metrics
    return loss, _detached(metrics)


def compute_sft_loss(log_probs_N: torch.Tensor, packed: PackedBatch) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood of the unmasked response tokens; returned like `compute_policy_loss`."""
    loss = weighted_sum(sft_loss(log_probs_N), packed.weight_N)
    return loss, {"train/loss": loss.detach()}


def compute_value_loss(values_N: torch.Tensor, packed: PackedBatch, value_clip: float) -> tuple[torch.Tensor, Metrics]:
    """The critic's loss at the unmasked response tokens; returned like `compute_policy_loss`.

    Args:
        values_N: values under the critic in training.
        packed: the micro-batch, with the columns `values`, those before the update, and `returns`.
        value_clip: see `value_loss`.
    """
    select = functools.partial(_select, packed)
    old_N, returns_N = select(packed.columns["values"]), select(packed.columns["returns"])
    term = value_loss(select(values_N), old_N, returns_N, value_clip)
    loss = weighted_sum(term.loss_N, packed.weight_N)
    return loss, {"train/value_loss": loss.detach()} | _weighted({"value_clipfrac": term.clipped_N}, packed)


def _compute_custom_loss(
    log_probs_N: torch.Tensor,
    entropy_N: torch.Tensor,
    packed: PackedBatch,
    custom: Callable[..., tuple[torch.Tensor, Metrics]],
    old: str,
    all_reduce: AllReduce | None,
) -> tuple[torch.Tensor, Metrics]:
    sums = SampleSums(packed, all_reduce)
    log_probs_N, entropy_N = _select(packed, log_probs_N), _select(packed, entropy_N)
    loss, metrics = custom(log_probs_N, entropy_N, packed, sums)
    with torch.no_grad():
        old_N, trainer_N, rollout_N = _compared(log_probs_N, packed, old)
        metrics = _distances(log_probs_N - old_N, trainer_N, rollout_N, packed, sums) | metrics
    return loss, _detached(metrics)


def _select(packed: PackedBatch, x_N: torch.Tensor) -> torch.Tensor:
    # Before any arithmetic: a gradient of zero that passes through exp(inf) would come out as NaN.
    return torch.where(packed.mask_N, x_N, 0.0)


def _compared(log_probs_N: torch.Tensor, packed: PackedBatch, old: str) -> tuple[torch.Tensor, ...]:
    """The log-probabilities to compare with, without gradient: the ratio's denominator, the trainer's, the engine's.

    The trainer's are those under the weights that the engine sampled with, or, unknown, the current ones.
    """
    rollout_N = _select(packed, packed.columns["rollout_log_probs"])
    trainer_N = _select(packed, packed.columns["old_log_probs"]) if old == "trainer" else log_probs_N.detach()
    return rollout_N if old == "engine" else trainer_N, trainer_N, rollout_N


def _distances(
    log_ratio_N: torch.Tensor,
    trainer_N: torch.Tensor,
    rollout_N: torch.Tensor,
    packed: PackedBatch,
    sums: SampleSums,
) -> Metrics:
    ratio_N = bounded_exp(trainer_N - rollout_N)
    return _weighted(mismatch_metrics(log_ratio_N, trainer_N, rollout_N, sums), packed) | extremes(
        "train/train_rollout_ratio", ratio_N, packed
    )


def _policy_term(
    log_probs_N: torch.Tensor,
    log_ratio_N: torch.Tensor,
    adv_N: torch.Tensor,
    settings: PolicySettings,
    sums: SampleSums,
) -> PolicyTerm:
    bounds = {"eps_clip": settings.eps_clip, "eps_clip_high": settings.eps_clip_high}
    match settings.form:
        case "clip":
            return clip_loss(log_ratio_N, adv_N, **bounds, eps_clip_c=settings.eps_clip_c)
        case "sequence_clip":
            log_ratio_N = sequence_log_ratio(log_ratio_N, sums)
            return clip_loss(log_ratio_N, adv_N, **bounds, eps_clip_c=settings.eps_clip_c)
        case "clipped_weight":
            return cispo_loss(log_probs_N, log_ratio_N, adv_N, **bounds)
        case _:
            assert_never(settings.form)


def _corrections(
    log_ratio_N: torch.Tensor,
    adv_N: torch.Tensor,
    trainer_N: torch.Tensor,
    rollout_N: torch.Tensor,
    packed: PackedBatch,
    settings: PolicySettings,
    sums: SampleSums,
) -> tuple[torch.Tensor | None, Metrics]:
    """The weight of each token's policy loss, None if none is asked for, and metrics; no input has a gradient."""
    weights: list[torch.Tensor] = []
    means: Metrics = {}
    metrics: Metrics = {}
    if settings.opsm_delta is not None:
        out_N = off_policy_sequences(log_ratio_N, adv_N, settings.opsm_delta, sums)
        weights.append((~out_N).float())
        means["opsm_clipfrac"] = out_N.float()
    if settings.tis is not None:
        weight_N, tis_means = importance_weights(trainer_N - rollout_N, settings.tis, sums)
        weights.append(weight_N)
        means |= tis_means | {"ois": bounded_exp(log_ratio_N)}
    if settings.custom_tis is not None:
        weight_N, metrics = settings.custom_tis(trainer_N, rollout_N, packed, sums)
        metrics = _detached(metrics)
        weights.append(_select(packed, weight_N.detach()))
    if settings.rejection is not None:
        out_N, rejection_means = rejected(trainer_N - rollout_N, settings.rejection, sums)
        weights.append((~out_N).float())
        means |= rejection_means
    total_N = functools.reduce(torch.mul, weights) if weights else None
    return total_N, metrics | _weighted(means, packed)


def _detached(metrics: Metrics) -> Metrics:
    """The metrics without gradient; UserError for one, of a custom function, that is no scalar tensor."""
    for name, value in metrics.items():
        if not isinstance(value, torch.Tensor) or value.ndim:
            raise UserError(f"metric {name} is {value!r}; a custom function must return scalar tensors as metrics")
    return {name: value.detach() for name, value in metrics.items()}


def _weighted(means: Metrics, packed: PackedBatch) -> Metrics:
    return {f"train/{name}": weighted_sum(x_N, packed.metric_weight_N) for name, x_N in means.items()}
