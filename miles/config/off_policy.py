"""What the trainer compares itself with, and what it does where the engine's probabilities were others."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.dotted_paths import dotted_path_problem
from miles.config.effect import OnlyWith
from miles.config.names import flag_of
from miles.config.section import Derived, Section, derives, rule, warning, written
from miles.config.values import Values

Level = Literal["token", "sequence", "geometric"]
WITH_TIS = OnlyWith("--use-tis or --custom-tis-function-path")


class OffPolicyConfig(Section):
    title: ClassVar[str] = "Off-policy corrections"

    use_rollout_logprobs: bool = Field(
        False, description="The ratio's denominator is the engine's log-probability, not the trainer's before the step."
    )
    keep_old_actor: bool = Field(
        False,
        description="Keep a copy of the weights that the engines got last, and take the ratio's denominator from it.",
    )
    skip_actor_forward_only: bool = Field(
        False,
        description="Spare the forward pass for the ratio's denominator: it is the log-probability of the training "
        "pass itself, so the ratio is 1. Needs one optimizer step a rollout.",
    )
    use_tis: bool = Field(
        False, description="Weigh the loss with the ratio of trainer to engine probabilities (importance sampling)."
    )
    tis_level: Annotated[Level, WITH_TIS] = Field(
        "token", description="That ratio is each token's, its whole sequence's, or the sequence's geometric mean."
    )
    tis_mode: Annotated[Literal["truncate", "mask"], WITH_TIS] = Field(
        "truncate", description="Outside of its bounds the ratio is moved to them, or the weight is 0 (IcePop)."
    )
    tis_clip: Annotated[float, WITH_TIS] = Field(2.0, gt=0, description="Upper bound of the ratio.")
    tis_clip_low: Annotated[float, WITH_TIS] = Field(0.0, ge=0, description="Lower bound of the ratio.")
    custom_tis_function_path: str | None = Field(
        None,
        description="Dotted path of a function that weighs the loss instead, with or without --use-tis: see "
        "miles.training.custom.",
    )
    use_rs: bool = Field(
        False,
        description="Leave out (rejection sampling) tokens or sequences whose ratio of trainer to engine probabilities "
        "is out of bounds.",
    )
    rs_level: Annotated[Level, OnlyWith("--use-rs")] = Field(
        "token", description="What that ratio is, as in --tis-level."
    )
    rs_upper_bound: Annotated[float, OnlyWith("--use-rs")] = Field(2.0, gt=0, description="Upper bound of the ratio.")
    rs_lower_bound: Annotated[float, OnlyWith("--use-rs")] = Field(0.5, ge=0, description="Lower bound of the ratio.")
    rs_veto_threshold: Annotated[float | None, OnlyWith("--use-rs")] = Field(
        None, gt=0, lt=1, description="Leave out a whole sequence if one token's ratio is below this. Unset: none."
    )
    use_opsm: bool = Field(
        False,
        description="Off-policy sequence masking: leave out sequences of negative advantage that the model has moved "
        "away from by more than --opsm-delta.",
    )
    opsm_delta: Annotated[float, OnlyWith("--use-opsm")] = Field(
        1e-4, ge=0, description="Bound of a sequence's mean of old minus current log-probability."
    )


@derives("use_tis")
def _weighed_by_a_function(v: Values) -> Iterator[Derived]:
    """Miles' own flags want both; the function weighs alone."""
    if v.use_tis and v.custom_tis_function_path is not None:
        yield "use_tis", False, "--custom-tis-function-path weighs the loss"


@rule
def _denominator(v: Values) -> Iterator[str]:
    engine, spared = v.use_rollout_logprobs, v.skip_actor_forward_only
    if engine:
        for flag in OffPolicyConfig.changed(v, "use_tis", "custom_tis_function_path", "use_rs"):
            yield (
                f"{flag} corrects for what lies between the engine's probabilities and the ratio's denominator, and "
                "--use-rollout-logprobs makes these the same; drop one"
            )
        for flag in OffPolicyConfig.changed(v, "keep_old_actor", "skip_actor_forward_only"):
            yield f"--use-rollout-logprobs and {flag} name different denominators of the ratio; drop one"
    if not spared:
        return
    if v.steps_per_rollout > 1:
        yield (
            "--skip-actor-forward-only makes every ratio 1, which is right for the first optimizer step of a rollout "
            f"only, and there are {v.steps_per_rollout}; give --num-steps-per-rollout 1, or drop it"
        )
    for name in ("keep_old_actor", "kl_coef", "use_opd", "use_opsm"):
        if value := getattr(v, name):
            yield f"{written(name, value)} needs the log-probabilities that --skip-actor-forward-only spares; drop one"
    if v.estimator.critic:
        yield f"--skip-actor-forward-only does not work with --advantage-estimator {v.estimator.name}; drop it"


@rule
def _bounds(v: Values) -> Iterator[str]:
    if (path := v.custom_tis_function_path) is not None:
        if problem := dotted_path_problem("--custom-tis-function-path", path, "my_module.weights"):
            yield problem
    for on, low, high in (
        (v.use_tis, "tis_clip_low", "tis_clip"),
        (v.use_rs, "rs_lower_bound", "rs_upper_bound"),
    ):
        if on and not getattr(v, low) <= 1 <= getattr(v, high):
            yield (
                f"{flag_of(low)} {getattr(v, low)} and {flag_of(high)} {getattr(v, high)} shut out a ratio of 1, at "
                "which trainer and engine agree; let the first be at most 1 and the second at least 1"
            )


@warning
def _without_need(v: Values) -> Iterator[str]:
    if v.loss_type != "policy_loss":
        return
    one_step = v.steps_per_rollout == 1 and not v.use_rollout_logprobs and not v.skip_actor_forward_only
    if v.use_opsm and one_step:
        yield (
            "--use-opsm leaves nothing out: a rollout is one optimizer step, before which the model is the ratio's "
            "denominator; give --num-steps-per-rollout or --use-rollout-logprobs"
        )
    if v.keep_old_actor:
        yield (
            "--keep-old-actor costs a copy of the weights and changes nothing: engines and trainer take turns, so that "
            "the engines' weights are the trainer's before a rollout's first step"
        )
