"""What evaluation must satisfy."""

from collections.abc import Iterator

from miles.config.eval_config import EvalSetConfig, eval_set_configs
from miles.config.multi_turn_rules import AGENT, MULTI_TURN
from miles.config.paths import PromptFile, dotted_path_problem
from miles.config.reward import WITHOUT_LABEL
from miles.config.rollout_rules import unknown_ids
from miles.config.values import Values


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
    own = entry.rm_type is not None
    reward = entry.rm_type if own else v.rm_type
    if own and v.custom_rm_path is not None:
        yield f"{where} rm_type {reward} has no effect, since --custom-rm-path is given; drop one of them"
    if reward is None:
        if v.custom_rm_path is None and v.use_opd and _evaluates(v):
            yield f"{where} {entry.name} needs a reward to evaluate with: give --rm-type or --custom-rm-path"
        return
    asked = f"rm_type {reward}" if own else f"--rm-type {reward}"
    label = entry.given("label_key", v.eval_label_key)
    # Where the flags name no label at all, the run's own reward lacks it too, which is said once.
    if reward not in WITHOUT_LABEL and label is None and (own or v.eval_label_key is not None):
        yield f"{where} {asked} needs label_key (or --eval-label-key), the column with the right answer"
    if own and reward == "remote_rm" and v.rm_url is None:
        yield f"{where} {asked} needs --rm-url, the address of its service"
    if own and reward == "dapo" and v.eval_reward_key is None:
        yield f"{where} {asked} gives score (1 or -1) and acc (1 or 0): choose one with --eval-reward-key"


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
