"""What the flags of collecting samples must satisfy."""

from collections.abc import Iterator

from miles.config.values import Values
from miles.hf.shape import model_shape

NONZERO_STD = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def _over_sampling(v: Values) -> Iterator[str]:
    asked, needed = v.over_sampling_batch_size, v.rollout_batch_size
    if not v.needs_engines:
        return
    if asked < needed:
        yield (
            f"--over-sampling-batch-size {asked} is less than --rollout-batch-size {needed}: so few prompts never make "
            f"a rollout; give at least {needed}, or leave it out"
        )
    elif asked > needed and v.fully_async:
        yield (
            f"--over-sampling-batch-size {asked} has no effect with --fully-async, which keeps "
            "--async-max-concurrent-samples in flight; drop it"
        )


def _masked_versions(v: Values) -> Iterator[str]:
    if v.mask_offpolicy_in_partial_rollout and not v.partial_rollout and v.needs_engines:
        yield (
            "--mask-offpolicy-in-partial-rollout is about responses that are continued, which needs --partial-rollout; "
            "add that, or drop it"
        )


def _equal_rewards(v: Values) -> Iterator[str]:
    if v.dynamic_sampling_filter_path != NONZERO_STD or not v.needs_engines:
        return
    if v.n_samples_per_prompt == 1:
        yield (
            "--dynamic-sampling-filter-path check_reward_nonzero_std refuses every group of --n-samples-per-prompt 1; "
            "give at least 2, or drop it"
        )
    if not v.has_reward and v.use_opd:
        yield (
            "--dynamic-sampling-filter-path check_reward_nonzero_std refuses every group without a reward; give "
            "--rm-type or --custom-rm-path, or drop it"
        )


def _rollouts_of_the_user(v: Values) -> Iterator[str]:
    if v.rollout_function_path is None or not v.needs_engines:
        return
    for flag, given in (
        (f"--over-sampling-batch-size {v.over_sampling_batch_size}", v.over_sampling_batch_size > v.rollout_batch_size),
        ("--partial-rollout", v.partial_rollout),
        (f"--max-weight-staleness {v.max_weight_staleness}", v.max_weight_staleness is not None),
    ):
        if given:
            yield f"{flag} has no effect: --rollout-function-path makes the whole rollout; drop one"


def _stop_ids(v: Values) -> Iterator[str]:
    yield from unknown_ids("--rollout-stop-token-ids", v.rollout_stop_token_ids, v.hf_checkpoint)


def unknown_ids(what: str, ids: list[int] | None, checkpoint: str) -> Iterator[str]:
    """What is wrong with token ids: those that the model has not never end anything, and can break an engine."""
    size = (model_shape(checkpoint) or {}).get("vocab_size")
    unknown = [] if size is None else [str(token) for token in ids or () if token >= size]
    if unknown:
        yield f"{what}: the model has no token {', '.join(unknown)}, its vocabulary ends at {size - 1}; drop it"


ROLLOUT_RULES = (_over_sampling, _masked_versions, _equal_rewards, _rollouts_of_the_user, _stop_ids)


def rollout_warnings(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    if not v.needs_engines or v.fully_async or v.over_sampling_batch_size > v.rollout_batch_size:
        return
    if v.partial_rollout:
        yield (
            "--partial-rollout has no effect: no response is cut off without --fully-async, or an "
            f"--over-sampling-batch-size above --rollout-batch-size {v.rollout_batch_size}"
        )
