"""What evaluation must satisfy."""

from collections.abc import Iterator

from miles.config.eval_config import EvalSetConfig, eval_set_configs
from miles.config.multi_turn_rules import AGENT, MULTI_TURN
from miles.config.paths import PromptFile, dotted_path_problem
from miles.config.reward import missing, wrong_key
from miles.config.rollout_rules import unknown_ids
from miles.config.values import Values
from miles.rewards import BUILT_IN


def _evaluation(v: Values) -> Iterator[str]:
    if not _evaluates(v):
        return
    asked = "--num-rollout 0 only evaluates: it" if v.num_rollout == 0 else f"--eval-interval {v.eval_interval}"
    if not v.eval_prompt_data and v.eval_config is None and v.eval_function_path is None:
        yield f"{asked} needs --eval-prompt-data NAME FILE, or --eval-config FILE"
    if not v.needs_engines:
        yield f"{asked} needs engines, and none runs in this layout; leave it out"
    if v.num_rollout == 0 and v.skip_eval_before_train:
        yield "--num-rollout 0 only evaluates, and --skip-eval-before-train leaves that out; drop it"


def _evaluates(v: Values) -> bool:
    return v.eval_interval is not None or v.num_rollout == 0


def _lengths(v: Values) -> Iterator[str]:
    context, prompt = v.eval_max_context_len, v.eval_max_prompt_len
    if (context, prompt) == (v.rollout_max_context_len, v.rollout_max_prompt_len):
        return  # what is wrong with them is said once
    if context is not None and prompt is not None and prompt >= context:
        yield (
            f"--eval-max-prompt-len {prompt} leaves no room for a response within --eval-max-context-len {context}; "
            f"at most {context - 1} is allowed"
        )


def _sets(v: Values) -> Iterator[str]:
    sets, problems = eval_set_configs(v.eval_prompt_data, v.eval_config)
    yield from problems
    for entry in sets:
        yield from _set(v, entry)


def _set(v: Values, entry: EvalSetConfig) -> Iterator[str]:
    where = "--eval-prompt-data" if v.eval_config is None else f"--eval-config {v.eval_config}: set {entry.name}:"
    if problem := PromptFile.problem(where, entry.path):
        yield problem
    yield from _reward(v, entry, where)
    least, most = entry.given("min_new_tokens", v.eval_min_new_tokens), entry.given("max_response_len", None)
    most = v.eval_max_response_len if most is None else most
    if most is not None and least > most:
        yield (
            f"{where} asks for responses of at least {least} tokens (min_new_tokens) and at most {most} "
            "(max_response_len); lower the first or raise the second"
        )
    if entry.top_k == 0:
        yield f"{where} top_k is at least 1, or -1 for all tokens; 0 was given"
    yield from unknown_ids(f"{where} stop_token_ids", entry.stop_token_ids, v.hf_checkpoint)
    path = entry.custom_generate_function_path
    if path is not None:
        name = f"{where} custom_generate_function_path"
        if problem := dotted_path_problem(name, path, "my_module.generate"):
            yield problem
        if path in (MULTI_TURN, AGENT) and v.eval_max_context_len is None:
            yield f"{name} {path} needs --eval-max-context-len, the most tokens of a conversation"


def _reward(v: Values, entry: EvalSetConfig, where: str) -> Iterator[str]:
    if entry.rm_type is not None and v.custom_rm_path is not None:
        yield f"{where} rm_type {entry.rm_type} has no effect, since --custom-rm-path is given; drop one of them"
    if entry.rm_type is None and not v.has_reward and v.use_opd and _evaluates(v):
        yield f"{where} {entry.name} needs a reward to evaluate with: give --rm-type or --custom-rm-path"
    label_key, label_flag = entry.given("label_key", v.eval_label_key), "label_key (or --eval-label-key)"
    if entry.rm_type is not None:
        reward, asked = BUILT_IN[entry.rm_type], f"{where} rm_type {entry.rm_type}"
        yield from missing(reward, asked, v, label_key, label_flag)
        yield from wrong_key(reward, asked, "--eval-reward-key", v.eval_reward_key)
    elif v.rm_type is not None and v.eval_label_key is not None and label_key is None:
        # Where the flags name no label at all, what the run's own reward lacks is said once.
        yield from missing(BUILT_IN[v.rm_type], f"{where} --rm-type {v.rm_type}", v, label_key, label_flag)


EVAL_RULES = [_evaluation, _lengths, _sets]


def eval_warnings(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    if not _evaluates(v) and v.load_debug_rollout_data is None:
        for flag, given in (
            ("--eval-prompt-data", v.eval_prompt_data),
            ("--eval-config", v.eval_config),
            ("--eval-function-path", v.eval_function_path),
            ("--custom-eval-rollout-log-function-path", v.custom_eval_rollout_log_function_path),
        ):
            if given:
                yield f"{flag} is never used: --eval-interval is not given"
