"""What the flags of advantages, losses, corrections, critic and distillation must satisfy among themselves."""

from collections.abc import Callable, Iterator

from miles.config.algorithm import AlgorithmConfig
from miles.config.critic import CriticConfig
from miles.config.distillation import DistillationConfig
from miles.config.names import flag_of, negation_of
from miles.config.off_policy import OffPolicyConfig
from miles.config.paths import dotted_path_problem
from miles.config.values import Values
from miles.hf.shape import model_shape
from miles.training.advantages import Estimator, estimators_where

FIELDS = (
    AlgorithmConfig.model_fields | OffPolicyConfig.model_fields | CriticConfig.model_fields
) | DistillationConfig.model_fields
# With supervised steps the rest of FIELDS has no effect; --eps-clip-high always follows from something.
SUPERVISED = {"loss_type", "custom_loss_function_path", "calculate_per_token_loss", "constant_loss_length"}
# Of config.json: what weights must agree in for one model to hold them.
SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
CORRECTIONS = ("use_tis", "custom_tis_function_path", "use_rs", "use_opsm")


def _given(v: Values, *names: str) -> list[str]:
    """Those of the fields that differ from their defaults, as one would write them."""
    changed = [(name, getattr(v, name)) for name in names if getattr(v, name) != FIELDS[name].default]
    return [_written(name, value) for name, value in changed]


def _written(name: str, value: object) -> str:
    if isinstance(value, bool):
        return flag_of(name) if value else negation_of(name)
    return f"{flag_of(name)} {' '.join(value) if isinstance(value, list) else value}"


def _estimator(holds: Callable[[Estimator], bool]) -> str:
    """The flag with each estimator of which something holds."""
    return f"--advantage-estimator {estimators_where(holds, ' or ')}"


def _without_their_switch(v: Values) -> Iterator[str]:
    distills = ("opd_type", "opd_kl_coef", "opd_teacher_load", "opd_teacher_urls")
    switches = (
        (v.loss_type == "custom_loss", "--loss-type custom_loss", ("custom_loss_function_path",)),
        (v.estimator.discounts, _estimator(lambda e: e.discounts), ("gamma",)),
        (v.estimator.critic, _estimator(lambda e: e.critic), ("lambd", *CriticConfig.model_fields)),
        (v.use_kl_loss, "--use-kl-loss", ("kl_loss_coef",)),
        (v.use_kl_loss and v.kl_loss_coef > 0, "--use-kl-loss and a --kl-loss-coef above 0", ("use_unbiased_kl",)),
        (v.use_kl_loss or v.kl_coef > 0, "--use-kl-loss or --kl-coef", ("ref_update_interval",)),
        (
            v.use_tis or v.custom_tis_function_path is not None,
            "--use-tis or --custom-tis-function-path",
            ("tis_level", "tis_mode", "tis_clip", "tis_clip_low"),
        ),
        (v.use_rs, "--use-rs", ("rs_level", "rs_upper_bound", "rs_lower_bound", "rs_veto_threshold")),
        (v.use_opsm, "--use-opsm", ("opsm_delta",)),
        (v.use_opd, "--use-opd", distills),
    )
    for on, switch, names in switches:
        if not on:
            for flag in _given(v, *names):
                yield f"{flag} has no effect without {switch}; add that, or drop it"


def _reward_statistics(v: Values) -> Iterator[str]:
    estimator, raw = v.estimator, v.disable_rewards_normalization
    if raw and estimator.compare is None:
        yield (
            f"--disable-rewards-normalization has no effect with --advantage-estimator {estimator.name}, which takes "
            "rewards as they are anyway; drop it"
        )
    if v.disable_grpo_std_normalization and not estimator.divides_by_std:
        yield (
            f"--disable-grpo-std-normalization has no effect with --advantage-estimator {estimator.name}, which "
            "divides by no standard deviation anyway; drop it (it is for "
            f"{estimators_where(lambda e: e.divides_by_std, ', ')})"
        )
    elif v.disable_grpo_std_normalization and raw:
        yield "--disable-grpo-std-normalization has no effect with --disable-rewards-normalization; drop one"


def _groups(v: Values) -> Iterator[str]:
    compares = v.estimator.compare is not None and not v.disable_rewards_normalization
    if v.learns_from_samples and v.needs_trainer and compares and v.n_samples_per_prompt == 1 and not v.use_opd:
        yield (
            "--n-samples-per-prompt 1 with group-normalised rewards: a response has nothing to be compared with, every "
            "advantage is 0 and nothing is learned; give at least 2, or --disable-rewards-normalization, or "
            f"{_estimator(lambda e: e.compare is None)}"
        )


def _whitening(v: Values) -> Iterator[str]:
    if v.estimator.whitens and v.normalize_advantages is False and v.learns_from_samples:
        yield (
            f"--no-normalize-advantages with --advantage-estimator {v.estimator.name}, whose advantages have no "
            "baseline or scale but the whitening's; drop it"
        )


def _loss(v: Values) -> Iterator[str]:
    path = v.custom_loss_function_path
    if v.loss_type == "custom_loss" and path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path, the dotted path of the loss"
    elif path is not None and (problem := dotted_path_problem("--custom-loss-function-path", path, "my_module.loss")):
        yield problem
    if v.estimator.loss == "clipped_weight" and v.eps_clip_c is not None:
        yield (
            f"--eps-clip-c {v.eps_clip_c} has no effect with --advantage-estimator {v.estimator.name}, whose ratio is "
            "a bounded weight for either sign of the advantage; drop it"
        )
    if v.calculate_per_token_loss and v.constant_loss_length is not None:
        source = f"--advantage-estimator {v.estimator.name} sets" if v.estimator.constant_length else "there is"
        yield (
            "--calculate-per-token-loss divides a step's losses by its tokens, and "
            f"{source} --constant-loss-length {v.constant_loss_length} to divide by; keep one"
        )


def _kl(v: Values) -> Iterator[str]:
    if v.use_unbiased_kl and v.kl_loss_type == "k2":
        yield (
            "--use-unbiased-kl with --kl-loss-type k2: weighed with the ratio, k2's gradient is not the divergence's; "
            "choose k1, k3 or low_var_kl, or drop the first (k2 alone has the right gradient)"
        )
    if v.kl_coef == 0:
        return
    if not v.estimator.kl_in_reward:
        yield (
            f"--kl-coef {v.kl_coef} is for --advantage-estimator {estimators_where(lambda e: e.kl_in_reward)}, and "
            f"that is {v.estimator.name}; use --use-kl-loss with --kl-loss-coef"
        )
    if v.use_kl_loss and v.kl_loss_coef > 0:
        yield (
            f"--kl-coef {v.kl_coef} and --kl-loss-coef {v.kl_loss_coef} both pull to the reference, one in the reward "
            "and one in the loss; keep one (--use-kl-loss without a coefficient only measures)"
        )


def _shapes_of_others(v: Values) -> Iterator[str]:
    """Another model's weights take the place of the trained one's for a forward pass."""
    own = model_shape(v.hf_checkpoint)
    for flag, on, folder in (
        ("--ref-load", v.needs_reference, v.ref_load),
        ("--opd-teacher-load", v.use_opd, v.opd_teacher_load),
    ):
        other = model_shape(folder) if on and folder is not None else None
        if own is None or other is None:
            continue
        for name in SHAPE:
            if own.get(name) != other.get(name):
                yield (
                    f"{flag} {folder} has {name} {other.get(name)} and --hf-checkpoint {own.get(name)}: its weights "
                    "are swapped in for the model's, so that both need one architecture"
                )


def _denominator(v: Values) -> Iterator[str]:
    engine, spared = v.use_rollout_logprobs, v.skip_actor_forward_only
    if engine:
        for flag in _given(v, "use_tis", "custom_tis_function_path", "use_rs"):
            yield (
                f"{flag} corrects for what lies between the engine's probabilities and the ratio's denominator, and "
                "--use-rollout-logprobs makes these the same; drop one"
            )
        for flag in _given(v, "keep_old_actor", "skip_actor_forward_only"):
            yield f"--use-rollout-logprobs and {flag} name different denominators of the ratio; drop one"
    if not spared:
        return
    if v.steps_per_rollout > 1:
        yield (
            "--skip-actor-forward-only makes every ratio 1, which is right for the first optimizer step of a rollout "
            f"only, and there are {v.steps_per_rollout}; give --num-steps-per-rollout 1, or drop it"
        )
    for flag in _given(v, "keep_old_actor", "kl_coef", "use_opd", "use_opsm"):
        yield f"{flag} needs the log-probabilities that --skip-actor-forward-only spares; drop one"
    if v.estimator.critic:
        yield f"--skip-actor-forward-only does not work with --advantage-estimator {v.estimator.name}; drop it"


def _bounds(v: Values) -> Iterator[str]:
    if v.use_tis and v.custom_tis_function_path is not None:
        yield (
            f"--use-tis and --custom-tis-function-path {v.custom_tis_function_path} both weigh the loss; keep one of "
            "them"
        )
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


def _critic(v: Values) -> Iterator[str]:
    if not v.use_critic:
        return
    if v.num_rollout is not None and v.num_critic_only_steps >= v.num_rollout:
        yield (
            f"--num-critic-only-steps {v.num_critic_only_steps} leaves none of --num-rollout {v.num_rollout} to the "
            f"actor; give at most {v.num_rollout - 1}"
        )
    if v.critic_save is not None and v.save is None:
        yield f"--critic-save {v.critic_save} has no effect without --save; add that, or drop it"
    for name in ("critic_load", "critic_save"):
        folder, of_actor = getattr(v, name), getattr(v, name.removeprefix("critic_"))
        if folder is not None and folder == of_actor:
            yield (
                f"{flag_of(name)} {folder} is the actor's folder too, and their checkpoints have the same names; "
                "choose another"
            )


def _critic_schedule(v: Values) -> Iterator[str]:
    if not v.use_critic:
        return
    if v.min_lr > v.critic_lr:
        yield f"--min-lr {v.min_lr} must not be above --critic-lr {v.critic_lr}: it bounds the decay of both"
    if v.lr_warmup_init > v.critic_lr:
        yield f"--lr-warmup-init {v.lr_warmup_init} must not be above --critic-lr {v.critic_lr}: both start with it"
    if v.lr_decay_iters is not None and v.critic_lr_warmup_iters >= v.lr_decay_iters:
        yield (
            f"--critic-lr-warmup-iters {v.critic_lr_warmup_iters} must be less than --lr-decay-iters {v.lr_decay_iters}"
        )


def _distillation(v: Values) -> Iterator[str]:
    if not v.use_opd:
        return
    kind, folder, urls = v.opd_type, v.opd_teacher_load, v.opd_teacher_urls
    if kind is None:
        yield "--use-opd needs --opd-type: sglang for a teacher on a server, megatron for one that the trainer loads"
    if kind == "megatron":
        if urls:
            yield "--opd-teacher-urls is for --opd-type sglang, and that is megatron; drop it"
        if folder is None:
            yield "--opd-type megatron needs --opd-teacher-load, the Hugging Face folder of the teacher"
    if kind == "sglang":
        if folder is not None:
            yield f"--opd-teacher-load {folder} is for --opd-type megatron, and that is sglang; drop it"
        if not urls:
            yield "--opd-type sglang needs --opd-teacher-urls, such as http://10.0.0.7:30000"
    for url in urls or []:
        if not url.startswith(("http://", "https://")):
            yield f"--opd-teacher-urls {url} must be the address of a server, such as http://10.0.0.7:30000"
    for url in sorted({url for url in urls or [] if urls.count(url) > 1}):
        yield f"--opd-teacher-urls names {url} more than once; name each server once"


ALGORITHM_RULES = (
    _without_their_switch,
    _reward_statistics,
    _groups,
    _whitening,
    _loss,
    _kl,
    _shapes_of_others,
    _denominator,
    _bounds,
    _critic,
    _critic_schedule,
    _distillation,
)


def algorithm_warnings(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    if v.loss_type == "sft_loss":
        names = [name for name in FIELDS if name not in SUPERVISED and name != "eps_clip_high"]
        if flags := _given(v, *names):
            yield f"with --loss-type sft_loss there are no rewards and ratios: {', '.join(flags)} has no effect"
        return
    if v.use_kl_loss and v.kl_loss_type == "k1" and v.kl_loss_coef > 0 and not v.use_unbiased_kl:
        yield (
            "--kl-loss-type k1 as a loss has a gradient of zero on average; k3 and low_var_kl pull to the reference, "
            "and so does k1 with --use-unbiased-kl"
        )
    if not (v.use_kl_loss or v.kl_coef > 0):
        for flag in _given(v, "ref_load", "kl_loss_type"):
            yield f"{flag} has no effect without --use-kl-loss or --kl-coef"
    if v.ref_update_interval is not None and v.num_rollout is not None and v.ref_update_interval >= v.num_rollout:
        yield f"--ref-update-interval {v.ref_update_interval} is never reached in --num-rollout {v.num_rollout}"
    if v.use_opd and v.opd_type == "sglang" and v.rollout_temperature != 1:
        yield (
            "--opd-type sglang gives the teacher's log-probabilities at temperature 1, and the student's are at "
            f"--rollout-temperature {v.rollout_temperature}: it is pulled to the teacher at temperature 1"
        )
    yield from _ratio_warnings(v)


def _ratio_warnings(v: Values) -> Iterator[str]:
    if v.loss_type == "custom_loss":
        left = _given(v, "eps_clip", "eps_clip_c", "entropy_coef", "kl_loss_coef", "use_unbiased_kl", *CORRECTIONS)
        if v.estimator.loss != "clip":
            left.insert(0, f"the ratio of --advantage-estimator {v.estimator.name}")
        if left:
            yield f"{', '.join(left)}: left to the function of --custom-loss-function-path, which replaces the loss"
        return
    if v.estimator.loss == "sequence_clip" and max(v.eps_clip, v.eps_clip_high) >= 0.1:
        yield (
            f"--eps-clip {v.eps_clip} and --eps-clip-high {v.eps_clip_high} hardly ever clip with "
            f"--advantage-estimator {v.estimator.name}, whose ratio is a geometric mean over a sequence; its paper has "
            "3e-4 and 4e-4"
        )
    if v.skip_actor_forward_only:
        for flag in _given(v, "eps_clip", "eps_clip_c"):
            yield f"{flag} has no effect with --skip-actor-forward-only, which makes every ratio 1"
    elif v.steps_per_rollout == 1 and not v.use_rollout_logprobs and v.use_opsm:
        yield (
            "--use-opsm leaves nothing out: a rollout is one optimizer step, before which the model is the ratio's "
            "denominator; give --num-steps-per-rollout or --use-rollout-logprobs"
        )
    if v.keep_old_actor:
        yield (
            "--keep-old-actor costs a copy of the weights and changes nothing: engines and trainer take turns, so that "
            "the engines' weights are the trainer's before a rollout's first step"
        )
