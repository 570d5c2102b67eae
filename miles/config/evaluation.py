"""Evaluation on held-out prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from miles.config.dotted_paths import dotted_path_problem
from miles.config.effect import EVALUATES
from miles.config.eval_config import EvalSetConfig, eval_set_configs
from miles.config.multi_turn import AGENT, MULTI_TURN
from miles.config.paths import PROMPT_FILE_ENDINGS, InputFile, PromptFile, absolute
from miles.config.reward import missing, wrong_key
from miles.config.rollout import unknown_ids
from miles.config.section import Derived, SameAs, Section, derives, rule
from miles.config.values import Values
from miles.rewards import BUILT_IN


def _absolute_files(pairs: list[str] | None) -> list[str] | None:
    """NAME FILE NAME FILE ..., every file with its `absolute` path; a file alone is called by its own name."""
    if pairs and len(pairs) == 1 and pairs[0].partition("@[")[0].endswith(PROMPT_FILE_ENDINGS):
        pairs = [Path(pairs[0].partition("@[")[0]).stem, pairs[0]]
    return pairs and [absolute(text) if place % 2 else text for place, text in enumerate(pairs)]


class EvaluationConfig(Section):
    title: ClassVar[str] = "Evaluation"

    eval_interval: int | None = Field(None, gt=0, description="Rollouts between evaluations. Unset: never.")
    eval_prompt_data: Annotated[list[str] | None, AfterValidator(_absolute_files), EVALUATES] = Field(
        None,
        description="Held-out prompts, as pairs: NAME FILE NAME FILE ...; the metric is eval/NAME. Or one FILE, whose "
        "name it has then.",
    )
    eval_config: Annotated[InputFile | None, EVALUATES] = Field(
        None,
        description="YAML file of evaluation sets with settings of their own, instead of --eval-prompt-data; see "
        "docs/user-guide/evaluation.md.",
    )
    skip_eval_before_train: bool = Field(False, description="Do not evaluate before the first rollout.")
    n_samples_per_eval_prompt: int = Field(1, gt=0, description="Responses sampled for each held-out prompt.")
    eval_temperature: Annotated[float | None, SameAs("rollout_temperature")] = Field(
        None, ge=0, description="Unset: --rollout-temperature. 0 is greedy."
    )
    eval_top_p: Annotated[float | None, SameAs("rollout_top_p")] = Field(
        None, gt=0, le=1, description="Unset: --rollout-top-p."
    )
    eval_top_k: Annotated[int | None, SameAs("rollout_top_k")] = Field(
        None, ge=-1, description="Unset: --rollout-top-k."
    )
    eval_max_response_len: Annotated[int | None, SameAs("rollout_max_response_len")] = Field(
        None, gt=0, description="Most tokens of a response. Unset: --rollout-max-response-len."
    )
    eval_min_new_tokens: int = Field(0, ge=0, description="Fewest tokens of a response.")
    eval_max_prompt_len: int | None = Field(
        None, gt=0, description="Most tokens of a prompt; longer ones are left out. Unset: --rollout-max-prompt-len."
    )
    eval_max_context_len: int | None = Field(
        None, gt=1, description="Most tokens of prompt and response together. Unset: --rollout-max-context-len."
    )
    eval_input_key: Annotated[str | None, SameAs("input_key")] = Field(
        None, description="Column with the prompt. Unset: --input-key."
    )
    eval_label_key: Annotated[str | None, SameAs("label_key")] = Field(
        None, description="Column with the right answer. Unset: --label-key."
    )
    eval_tool_key: Annotated[str | None, SameAs("tool_key")] = Field(
        None, description="Column with tools. Unset: --tool-key."
    )
    log_passrate: bool = Field(
        False,
        description="Also show pass@k for k = 1, 2, 4, ...: the chance that one of k samples of a prompt has reward 1.",
    )


@derives("eval_interval")
def _not_with_loaded_samples(v: Values) -> Iterator[Derived]:
    if v.load_debug_rollout_data is not None and v.eval_interval is not None:
        yield "eval_interval", None, "--load-debug-rollout-data: no engine runs"


@rule
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


@rule
def _lengths(v: Values) -> Iterator[str]:
    context, prompt = v.eval_max_context_len, v.eval_max_prompt_len
    if (context, prompt) == (v.rollout_max_context_len, v.rollout_max_prompt_len):
        return  # what is wrong with them is said once
    if context is not None and prompt is not None and prompt >= context:
        yield (
            f"--eval-max-prompt-len {prompt} leaves no room for a response within --eval-max-context-len {context}; "
            f"at most {context - 1} is allowed"
        )


@rule
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
