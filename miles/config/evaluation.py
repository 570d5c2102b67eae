"""Evaluation on held-out prompts."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from miles.config.paths import InputFile, absolute
from miles.config.section import Derived, SameAs, Section, derives
from miles.config.values import Values


def _absolute_files(pairs: list[str] | None) -> list[str] | None:
    """NAME FILE NAME FILE ..., every file with its `absolute` path."""
    return pairs and [absolute(text) if place % 2 else text for place, text in enumerate(pairs)]


class EvaluationConfig(Section):
    title: ClassVar[str] = "Evaluation"

    eval_interval: int | None = Field(None, gt=0, description="Rollouts between evaluations. Unset: never.")
    eval_prompt_data: Annotated[list[str] | None, AfterValidator(_absolute_files)] = Field(
        None, description="Held-out prompts, as pairs: NAME FILE NAME FILE ...; the metric is eval/NAME."
    )
    eval_config: InputFile | None = Field(
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
