"""What the trainer compares itself with, and what it does where the engine's probabilities were others."""

from typing import ClassVar, Literal

from pydantic import Field

from miles.config.section import Section

Level = Literal["token", "sequence", "geometric"]


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
    tis_level: Level = Field(
        "token", description="That ratio is each token's, its whole sequence's, or the sequence's geometric mean."
    )
    tis_mode: Literal["truncate", "mask"] = Field(
        "truncate", description="Outside of its bounds the ratio is moved to them, or the weight is 0 (IcePop)."
    )
    tis_clip: float = Field(2.0, gt=0, description="Upper bound of the ratio.")
    tis_clip_low: float = Field(0.0, ge=0, description="Lower bound of the ratio.")
    custom_tis_function_path: str | None = Field(
        None, description="Dotted path of a function that weighs the loss instead: see miles.training.custom."
    )
    use_rs: bool = Field(
        False,
        description="Leave out (rejection sampling) tokens or sequences whose ratio of trainer to engine probabilities "
        "is out of bounds.",
    )
    rs_level: Level = Field("token", description="What that ratio is, as in --tis-level.")
    rs_upper_bound: float = Field(2.0, gt=0, description="Upper bound of the ratio.")
    rs_lower_bound: float = Field(0.5, ge=0, description="Lower bound of the ratio.")
    rs_veto_threshold: float | None = Field(
        None, gt=0, lt=1, description="Leave out a whole sequence if one token's ratio is below this. Unset: none."
    )
    use_opsm: bool = Field(
        False,
        description="Off-policy sequence masking: leave out sequences of negative advantage that the model has moved "
        "away from by more than --opsm-delta.",
    )
    opsm_delta: float = Field(
        1e-4, ge=0, description="Bound of a sequence's mean of old minus current log-probability."
    )
