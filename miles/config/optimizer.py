"""Adam and its schedule."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from miles.config.section import Derived, Section, derives
from miles.config.values import Values


class OptimizerConfig(Section):
    title: ClassVar[str] = "Optimizer"

    lr: float = Field(1e-6, ge=0, description="Learning rate after the warm-up.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        "constant", description="Shape of the decay. WSD: constant, then a decay of --lr-wsd-decay-iters steps."
    )
    lr_decay_iters: int | None = Field(
        None, gt=0, description="Optimizer steps until the decay ends. Unset: all steps of the run."
    )
    lr_wsd_decay_iters: int | None = Field(None, gt=0, description="Optimizer steps of WSD's decay, at its end.")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = Field(
        "exponential", description="Shape of WSD's decay."
    )
    lr_warmup_iters: int = Field(
        0, ge=0, description="Optimizer steps of the linear warm-up. The first has the rate of --lr-warmup-init."
    )
    lr_warmup_fraction: float | None = Field(
        None, ge=0, lt=1, description="The warm-up as a share of --lr-decay-iters, instead of --lr-warmup-iters."
    )
    lr_warmup_init: float = Field(0.0, ge=0, description="Learning rate at which the warm-up starts.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="How weight decay goes from --start-weight-decay to --end-weight-decay over --lr-decay-iters.",
    )
    start_weight_decay: float | None = Field(None, ge=0, description="Weight decay at the start, if it rises.")
    end_weight_decay: float | None = Field(None, ge=0, description="Weight decay at the end, if it rises.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of Adam's second moment.")
    adam_eps: float = Field(1e-8, gt=0, description="Term that keeps Adam's denominator from zero.")
    clip_grad: float = Field(1.0, ge=0, description="Bound of the gradient's norm; 0: none.")
    use_distributed_optimizer: bool = Field(
        True, description="Split master weights and moments over the data-parallel ranks."
    )
    reset_optimizer_states: bool = Field(False, description="Clear Adam's moments before each rollout is trained on.")
    max_nonfinite_steps: int = Field(
        3,
        ge=0,
        description="Optimizer steps in a row that are skipped because their gradient's norm is not finite; one more "
        "stops the run.",
    )


@derives("lr_decay_iters")
def _decay(v: Values) -> Iterator[Derived]:
    if v.use_critic and v.num_critic_only_steps:
        return  # Actor and critic take different numbers of steps: each one's schedule has its own.
    if v.lr_decay_iters is None and v.num_rollout is not None and v.steps_per_rollout > 0:
        steps = v.num_rollout * v.steps_per_rollout
        warmup = max(v.lr_warmup_iters, v.critic_lr_warmup_iters if v.use_critic else 0)
        if steps > warmup:
            yield "lr_decay_iters", steps, f"{v.num_rollout} rollouts of {v.steps_per_rollout} steps"
        else:
            yield "lr_decay_iters", warmup + 1, f"the run's {steps} steps end within the warm-up"
