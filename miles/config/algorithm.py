"""The advantages and the loss."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.critic import CriticConfig
from miles.config.distillation import DistillationConfig
from miles.config.dotted_paths import dotted_path_problem
from miles.config.effect import NotWith, OnlyWith
from miles.config.off_policy import OffPolicyConfig
from miles.config.other_models import shape_differences, unread_weights
from miles.config.paths import ModelFolder
from miles.config.section import Derived, SameAs, Section, derives, rule, warning
from miles.config.values import Values
from miles.training.advantages import ESTIMATORS, Estimator, estimators_where

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]


def learns_from_samples(v: Values) -> bool:
    """For `where`."""
    return v.learns_from_samples


def has_miles_loss(v: Values) -> bool:
    """For `where`."""
    return v.loss_type == "policy_loss"


def _with_estimator(holds: Callable[[Estimator], bool]) -> str:
    """The flag with each estimator of which something holds."""
    return f"--advantage-estimator {estimators_where(holds, ' or ')}"


class AlgorithmConfig(Section):
    title: ClassVar[str] = "Algorithm"

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = Field(
        "policy_loss",
        description="policy_loss learns from sampled responses and rewards, sft_loss, without engines, from the "
        "labels, or without --label-key from what the assistant says in the conversations of --input-key; "
        "custom_loss is policy_loss with the loss of --custom-loss-function-path.",
    )
    custom_loss_function_path: Annotated[str | None, OnlyWith("--loss-type custom_loss")] = Field(
        None, description="Dotted path of the loss of --loss-type custom_loss: see miles.training.custom."
    )
    advantage_estimator: EstimatorName = Field(
        next(iter(ESTIMATORS)),
        description="How rewards become advantages, and with "
        f"{estimators_where(lambda e: e.loss != 'clip')} the form of the loss; {estimators_where(lambda e: e.critic)} "
        "trains a critic.",
    )
    disable_grpo_std_normalization: Annotated[
        bool,
        OnlyWith(_with_estimator(lambda e: e.divides_by_std)),
        NotWith("--disable-rewards-normalization"),
    ] = Field(
        False, description="Only subtract the group's mean from its rewards; do not divide by its standard deviation."
    )
    disable_rewards_normalization: bool = Field(False, description="Use rewards as they are, without group statistics.")
    normalize_advantages: bool | None = Field(
        None,
        description=f"Whiten the advantages over a rollout. Unset: on with {estimators_where(lambda e: e.whitens)}.",
    )
    gamma: Annotated[float, OnlyWith(_with_estimator(lambda e: e.discounts))] = Field(
        1.0, ge=0, le=1, description=f"Discount of later rewards: {estimators_where(lambda e: e.discounts)}."
    )
    lambd: Annotated[float, OnlyWith(_with_estimator(lambda e: e.critic))] = Field(
        1.0,
        ge=0,
        le=1,
        description=f"Lambda of generalised advantage estimation: {estimators_where(lambda e: e.critic)}.",
    )
    kl_coef: Annotated[
        float,
        OnlyWith(
            _with_estimator(lambda e: e.kl_in_reward),
            note="while --use-kl-loss with --kl-loss-coef is for all estimators",
        ),
    ] = Field(
        0.0,
        ge=0,
        description="Weight of the KL divergence from a reference model in the reward of each token: "
        f"{estimators_where(lambda e: e.kl_in_reward)}. Its estimator is --kl-loss-type.",
    )
    eps_clip: Annotated[
        float,
        NotWith("--skip-actor-forward-only", note="which makes every ratio 1", where=has_miles_loss, warns=True),
    ] = Field(0.2, gt=0, lt=1, description="The probability ratio is clipped from below at 1 minus this.")
    eps_clip_high: Annotated[float | None, SameAs("eps_clip")] = Field(
        None, gt=0, description="The probability ratio is clipped from above at 1 plus this. Unset: --eps-clip."
    )
    eps_clip_c: Annotated[
        float | None,
        NotWith(
            _with_estimator(lambda e: e.loss == "clipped_weight"),
            note="whose ratio is a bounded weight for either sign of the advantage",
        ),
        NotWith("--skip-actor-forward-only", note="which makes every ratio 1", where=has_miles_loss, warns=True),
    ] = Field(
        None,
        gt=1,
        description="Dual clip: bound of the loss, in multiples of the advantage, where that is negative. Unset: none.",
    )
    use_kl_loss: bool = Field(False, description="Add the KL divergence from a reference model to the loss.")
    kl_loss_coef: Annotated[float, OnlyWith("--use-kl-loss")] = Field(
        0.0, ge=0, description="Weight of that divergence; 0 only measures it."
    )
    kl_loss_type: Annotated[
        Literal["k1", "k2", "k3", "low_var_kl"],
        OnlyWith("--use-kl-loss or --kl-coef", where=learns_from_samples, warns=True),
    ] = Field(
        "k1", description="Its estimator; low_var_kl is k3 with bounds. k1 as a loss has a gradient of zero on average."
    )
    use_unbiased_kl: Annotated[
        bool,
        OnlyWith(
            "--use-kl-loss and a --kl-loss-coef above 0", when=lambda v: bool(v.use_kl_loss and v.kl_loss_coef > 0)
        ),
    ] = Field(False, description="Multiply the KL loss with the probability ratio, which makes its gradient unbiased.")
    ref_load: Annotated[
        ModelFolder | None, OnlyWith("--use-kl-loss or --kl-coef", where=learns_from_samples, warns=True)
    ] = Field(
        None,
        description="Hugging Face folder of the reference model. Unset: --hf-checkpoint, where a reference is needed.",
    )
    ref_update_interval: Annotated[int | None, OnlyWith("--use-kl-loss or --kl-coef")] = Field(
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


@derives("ref_load")
def _reference(v: Values) -> Iterator[Derived]:
    if v.needs_reference and v.ref_load is None:
        asked = "--use-kl-loss" if v.use_kl_loss else f"--kl-coef {v.kl_coef}"
        yield "ref_load", v.hf_checkpoint, f"{asked}: the reference is --hf-checkpoint"


@derives("normalize_advantages")
def _whitening(v: Values) -> Iterator[Derived]:
    if v.normalize_advantages is None and v.learns_from_samples:
        yield "normalize_advantages", v.estimator.whitens, f"--advantage-estimator {v.estimator.name}"


@derives("constant_loss_length")
def _constant_length(v: Values) -> Iterator[Derived]:
    if v.constant_loss_length is None and v.estimator.constant_length and v.learns_from_samples:
        if v.rollout_max_response_len is not None:
            reason = f"--advantage-estimator {v.estimator.name}: --rollout-max-response-len"
            yield "constant_loss_length", v.rollout_max_response_len, reason


@rule
def _raw_rewards(v: Values) -> Iterator[str]:
    if v.disable_rewards_normalization and v.estimator.compare is None:
        yield (
            f"--disable-rewards-normalization has no effect with --advantage-estimator {v.estimator.name}, which takes "
            "rewards as they are anyway; drop it"
        )


@rule
def _groups(v: Values) -> Iterator[str]:
    compares = v.estimator.compare is not None and not v.disable_rewards_normalization
    if v.learns_from_samples and v.needs_trainer and compares and v.n_samples_per_prompt == 1 and not v.use_opd:
        yield (
            "--n-samples-per-prompt 1 with group-normalised rewards: a response has nothing to be compared with, every "
            "advantage is 0 and nothing is learned; give at least 2, or --disable-rewards-normalization, or "
            f"{_with_estimator(lambda e: e.compare is None)}"
        )


@rule
def _whitened(v: Values) -> Iterator[str]:
    if v.estimator.whitens and v.normalize_advantages is False and v.learns_from_samples:
        yield (
            f"--no-normalize-advantages with --advantage-estimator {v.estimator.name}, whose advantages have no "
            "baseline or scale but the whitening's; drop it"
        )


@rule
def _loss(v: Values) -> Iterator[str]:
    path = v.custom_loss_function_path
    if v.loss_type == "custom_loss" and path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path, the dotted path of the loss"
    elif path is not None and (problem := dotted_path_problem("--custom-loss-function-path", path, "my_module.loss")):
        yield problem
    if v.calculate_per_token_loss and v.constant_loss_length is not None:
        source = f"--advantage-estimator {v.estimator.name} sets" if v.estimator.constant_length else "there is"
        yield (
            "--calculate-per-token-loss divides a step's losses by its tokens, and "
            f"{source} --constant-loss-length {v.constant_loss_length} to divide by; keep one"
        )


@rule
def _kl(v: Values) -> Iterator[str]:
    if v.use_unbiased_kl and v.kl_loss_type == "k2":
        yield (
            "--use-unbiased-kl with --kl-loss-type k2: weighed with the ratio, k2's gradient is not the divergence's; "
            "choose k1, k3 or low_var_kl, or drop the first (k2 alone has the right gradient)"
        )
    if v.kl_coef > 0 and v.use_kl_loss and v.kl_loss_coef > 0:
        yield (
            f"--kl-coef {v.kl_coef} and --kl-loss-coef {v.kl_loss_coef} both pull to the reference, one in the reward "
            "and one in the loss; keep one (--use-kl-loss without a coefficient only measures)"
        )


@rule
def _shape_of_the_reference(v: Values) -> Iterator[str]:
    if v.needs_reference and v.ref_load is not None:
        yield from shape_differences(v, "--ref-load", v.ref_load)
        if v.ref_load != v.hf_checkpoint:
            yield from unread_weights("--ref-load", v.ref_load)


@warning
def _supervised(v: Values) -> Iterator[str]:
    if v.learns_from_samples:
        return
    # What has an effect there too; --eps-clip-high always follows from something.
    kept = ("loss_type", "custom_loss_function_path", "calculate_per_token_loss", "constant_loss_length")
    names = [name for name in AlgorithmConfig.model_fields if name not in (*kept, "eps_clip_high")]
    others = (OffPolicyConfig, CriticConfig, DistillationConfig)
    flags = AlgorithmConfig.changed(v, *names) + [flag for section in others for flag in section.changed(v)]
    if flags:
        yield f"with --loss-type sft_loss there are no rewards and ratios: {', '.join(flags)} has no effect"


@warning
def _reference_terms(v: Values) -> Iterator[str]:
    if not v.learns_from_samples:
        return
    if v.use_kl_loss and v.kl_loss_type == "k1" and v.kl_loss_coef > 0 and not v.use_unbiased_kl:
        yield (
            "--kl-loss-type k1 as a loss has a gradient of zero on average; k3 and low_var_kl pull to the reference, "
            "and so does k1 with --use-unbiased-kl"
        )
    if v.ref_update_interval is not None and v.num_rollout is not None and v.ref_update_interval >= v.num_rollout:
        yield f"--ref-update-interval {v.ref_update_interval} is never reached in --num-rollout {v.num_rollout}"


@warning
def _left_to_the_function(v: Values) -> Iterator[str]:
    if v.loss_type != "custom_loss":
        return
    left = [] if v.estimator.loss == "clip" else [f"the ratio of --advantage-estimator {v.estimator.name}"]
    left += AlgorithmConfig.changed(v, "eps_clip", "eps_clip_c", "entropy_coef", "kl_loss_coef", "use_unbiased_kl")
    left += OffPolicyConfig.changed(v, "use_tis", "custom_tis_function_path", "use_rs", "use_opsm")
    if left:
        yield f"{', '.join(left)}: left to the function of --custom-loss-function-path, which replaces the loss"


@warning
def _wide_clip(v: Values) -> Iterator[str]:
    if has_miles_loss(v) and v.estimator.loss == "sequence_clip" and max(v.eps_clip, v.eps_clip_high) >= 0.1:
        yield (
            f"--eps-clip {v.eps_clip} and --eps-clip-high {v.eps_clip_high} hardly ever clip with "
            f"--advantage-estimator {v.estimator.name}, whose ratio is a geometric mean over a sequence; its paper has "
            "3e-4 and 4e-4"
        )
