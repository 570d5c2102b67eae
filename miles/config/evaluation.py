"""Evaluation on held-out prompts."""

from typing import ClassVar

from pydantic import Field

from miles.config.section import Section


class EvaluationConfig(Section):
    title: ClassVar[str] = "Evaluation"

    eval_interval: int | None = Field(None, gt=0, description="Rollouts between evaluations. Unset: never.")
    eval_prompt_data: list[str] | None = Field(
        None, description="Held-out prompts, as pairs: NAME FILE NAME FILE ...; the metric is eval/NAME."
    )
    skip_eval_before_train: bool = Field(False, description="Do not evaluate before the first rollout.")
    n_samples_per_eval_prompt: int = Field(1, gt=0, description="Responses sampled for each held-out prompt.")
    eval_temperature: float | None = Field(None, ge=0, description="Unset: --rollout-temperature. 0 is greedy.")
    eval_top_p: float | None = Field(None, gt=0, le=1, description="Unset: --rollout-top-p.")
    eval_top_k: int | None = Field(None, ge=-1, description="Unset: --rollout-top-k.")
    eval_max_response_len: int | None = Field(
        None, gt=0, description="Most tokens of a response. Unset: --rollout-max-response-len."
    )
    eval_input_key: str | None = Field(None, description="Column with the prompt. Unset: --input-key.")
    eval_label_key: str | None = Field(None, description="Column with the right answer. Unset: --label-key.")
