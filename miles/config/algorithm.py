"""The loss and the advantages."""

from typing import ClassVar, Literal

from pydantic import Field

from miles.config.section import Section


class AlgorithmConfig(Section):
    title: ClassVar[str] = "Algorithm"

    loss_type: Literal["policy_loss", "sft_loss"] = Field(
        "policy_loss",
        description="policy_loss learns from sampled responses and rewards, sft_loss from the labels, without engines.",
    )
    advantage_estimator: Literal["grpo"] = Field(
        "grpo", description="How rewards become advantages: grpo compares a response with the others of its group."
    )
    eps_clip: float = Field(0.2, gt=0, lt=1, description="The probability ratio is clipped from below at 1 minus this.")
    eps_clip_high: float | None = Field(
        None, gt=0, description="The probability ratio is clipped from above at 1 plus this. Unset: --eps-clip."
    )
    eps_clip_c: float | None = Field(
        None,
        gt=1,
        description="Dual clip: bound of the loss, in multiples of the advantage, where that is negative. Unset: none.",
    )
    use_kl_loss: bool = Field(False, description="Add the KL divergence from a reference model to the loss.")
    kl_loss_coef: float = Field(0.0, ge=0, description="Weight of that divergence; 0 only measures it.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k1", description="Its estimator; low_var_kl is k3 with bounds. k1 as a loss has a gradient of zero on average."
    )
    ref_load: str | None = Field(
        None, description="Hugging Face folder of the reference model. Unset: --hf-checkpoint, with --use-kl-loss."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    disable_grpo_std_normalization: bool = Field(
        False, description="Only subtract the group's mean from its rewards; do not divide by its standard deviation."
    )
    disable_rewards_normalization: bool = Field(False, description="Use rewards as they are, without group statistics.")
    calculate_per_token_loss: bool = Field(
        False, description="Average the loss over all tokens of a step, instead of within and then over its samples."
    )
    use_rollout_logprobs: bool = Field(
        False, description="The ratio's denominator is the engine's log-probability, not the trainer's before the step."
    )
