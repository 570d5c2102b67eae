"""Adam and its schedule."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.effect import NotWith, OnlyWith, trainer_runs
from miles.config.names import flag_of
from miles.config.section import Derived, Section, derives, rule, warning
from miles.config.values import Values

_RISES = OnlyWith("--weight-decay-incr-style linear or cosine", "for --weight-decay is what else holds throughout")


class OptimizerConfig(Section):
    title: ClassVar[str] = "Optimizer"

    lr: float = Field(1e-6, ge=0, description="Learning rate after the warm-up.")
    min_lr: Annotated[float, NotWith("--lr-decay-style constant", where=trainer_runs, warns=True)] = Field(
        0.0, ge=0, description="Learning rate at the end of the decay."
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        "constant", description="Shape of the decay. WSD: constant, then a decay of --lr-wsd-decay-iters steps."
    )
    lr_decay_iters: int | None = Field(
        None, gt=0, description="Optimizer steps until the decay ends. Unset: all steps of the run."
    )
    lr_wsd_decay_iters: Annotated[int | None, OnlyWith("--lr-decay-style WSD")] = Field(
        None, gt=0, description="Optimizer steps of WSD's decay, at its end."
    )
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], OnlyWith("--lr-decay-style WSD")
    ] = Field("exponential", description="Shape of WSD's decay.")
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
    start_weight_decay: Annotated[float | None, _RISES] = Field(
        None, ge=0, description="Weight decay at the start, if it rises."
    )
    end_weight_decay: Annotated[float | None, _RISES] = Field(
        None, ge=0, description="Weight decay at the end, if it rises."
    )
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


@rule
def _rates(v: Values) -> Iterator[str]:
    if v.lr_decay_iters is not None and v.lr_warmup_iters >= v.lr_decay_iters:
        yield f"--lr-warmup-iters {v.lr_warmup_iters} must be less than --lr-decay-iters {v.lr_decay_iters}"
    if v.min_lr > v.lr:
        yield f"--min-lr {v.min_lr} must not be above --lr {v.lr}"


@rule
def _rate_schedule(v: Values) -> Iterator[str]:
    if v.lr_warmup_fraction is not None and v.lr_warmup_iters:
        yield (
            f"--lr-warmup-fraction {v.lr_warmup_fraction} and --lr-warmup-iters {v.lr_warmup_iters} both set the "
            "warm-up; keep one"
        )
    if v.lr_warmup_init > v.lr:
        yield f"--lr-warmup-init {v.lr_warmup_init} is above --lr {v.lr}; the warm-up rises, so give a lower one"
    wsd = v.lr_decay_style == "WSD"
    if wsd and v.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, the optimizer steps of the decay at its end; add it"
    if wsd and v.lr_wsd_decay_iters is not None and v.lr_wsd_decay_iters > (v.lr_decay_iters or v.lr_wsd_decay_iters):
        yield (
            f"--lr-wsd-decay-iters {v.lr_wsd_decay_iters} is more than --lr-decay-iters {v.lr_decay_iters}, at whose "
            "end it decays; lower the first or raise the second"
        )


@rule
def _weight_decay(v: Values) -> Iterator[str]:
    start, end, style = v.start_weight_decay, v.end_weight_decay, v.weight_decay_incr_style
    if style == "constant":
        return
    if start is None or end is None:
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay; add both"
    elif end < start:
        yield f"--end-weight-decay {end} is below --start-weight-decay {start}; weight decay can only rise"


@warning
def _no_step(v: Values) -> Iterator[str]:
    if not v.needs_trainer:
        return
    if v.lr == 0:
        yield "--lr 0: the weights will not change"
    for name in ("lr_warmup_iters", *(("critic_lr_warmup_iters",) if v.use_critic else ())):
        if getattr(v, name) == 1 and v.lr_warmup_init == 0:
            yield (
                f"{flag_of(name)} 1: the one step of the warm-up has the rate --lr-warmup-init 0.0 and changes no "
                "weight; drop it, or give a higher --lr-warmup-init"
            )
