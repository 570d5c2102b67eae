"""The advantages and the loss."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from miles.config.paths import ModelFolder
from miles.config.section import Section
from miles.training.advantages import ESTIMATORS, estimators_where

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]


class AlgorithmConfig(Section):
    title: ClassVar[str] = "Algorithm"

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = Field(
        "policy_loss",
        description="policy_loss learns from sampled responses and rewards, sft_loss from the labels, without engines; "
        "custom_loss is policy_loss with the loss of --custom-loss-function-path.",
    )
    custom_loss_function_path: str | None = Field(
        None, description="Dotted path of the loss of --loss-type custom_loss: see miles.training.custom."
    )
    advantage_estimator: EstimatorName = Field(
        next(iter(ESTIMATORS)),
        description="How rewards become advantages, and with "
        f"{estimators_where(lambda e: e.loss != 'clip')} the form of the loss; {estimators_where(lambda e: e.critic)} "
        "trains a critic.",
    )
    disable_grpo_std_normalization: bool = Field(
        False, description="Only subtract the group's mean from its rewards; do not divide by its standard deviation."
    )
    disable_rewards_normalization: bool = Field(False, description="Use rewards as they are, without group statistics.")
    normalize_advantages: bool | None = Field(
        None,
        description=f"Whiten the advantages over a rollout. Unset: on with {estimators_where(lambda e: e.whitens)}.",
    )
    gamma: float = Field(
        1.0, ge=0, le=1, description=f"Discount of later rewards: {estimators_where(lambda e: e.discounts)}."
    )
    lambd: float = Field(
        1.0,
        ge=0,
        le=1,
        description=f"Lambda of generalised advantage estimation: {estimators_where(lambda e: e.critic)}.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL divergence from a reference model in the reward of each token: "
        f"{estimators_where(lambda e: e.kl_in_reward)}. Its estimator is --kl-loss-type.",
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
    use_unbiased_kl: bool = Field(
        False, description="Multiply the KL loss with the probability ratio, which makes its gradient unbiased."
    )
    ref_load: ModelFolder | None = Field(
        None,
        description="Hugging Face folder of the reference model. Unset: --hf-checkpoint, where a reference is needed.",
    )
    ref_update_interval: int | None = Field(
        None, gt=0, description="Rollouts after which the reference becomes the trained model. Unset: never."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    calculate_per_token_loss: bool = Field(
        False, description="Average the loss over all tokens of a step, instead of within and then over its samples."
    )
    constant_loss_length: int | None = Field(
        None,
        gt=0,
        description="Divide each sample's sum of losses by this many tokens instead of its own number, which favours "
        "short responses. Unset: with "
        f"{estimators_where(lambda e: e.constant_length)}, --rollout-max-response-len.",
    )
