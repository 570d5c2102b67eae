"""Arguments of the SGLang server, and how many tokens one takes."""

import os
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from miles.config.context_length import KEPT_BY_SGLANG, engine_context, model_context, overridden
from miles.config.section import Section, rule
from miles.config.sglang_args import has_draft
from miles.config.values import Values
from miles.hf.shape import model_shape

ALLOW_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


class SglangConfig(Section):
    title: ClassVar[str] = "SGLang"

    sglang: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the SGLang server: write --sglang-NAME VALUE for its --NAME, any number of times.",
    )


@rule
def _engine_parallel_sizes(v: Values) -> Iterator[str]:
    if not v.needs_engines or v.rollout_external:
        return
    size = v.rollout_num_gpus_per_engine
    stages, replicas, experts = (v.sglang.get(name, 1) for name in ("pp_size", "dp_size", "ep_size"))
    for flag, value in (("--sglang-pp-size", stages), ("--sglang-dp-size", replicas), ("--sglang-ep-size", experts)):
        if value < 1:
            yield f"{flag} is {value}; it is at least 1"
            return
    if (given := v.sglang.get("tp_size")) is not None:  # one that is right has been taken out
        yield (
            f"--sglang-tp-size {given} contradicts --rollout-num-gpus-per-engine {size}: tensor-parallel ranks times "
            "--sglang-pp-size are the GPUs of an engine; leave it out"
        )
    if size % stages:
        yield (
            f"--sglang-pp-size {stages} does not divide --rollout-num-gpus-per-engine {size}, the GPUs of an engine; "
            "choose a divisor"
        )
        return
    if stages > 1 and v.needs_trainer:
        yield (
            f"--sglang-pp-size {stages}: SGLang addresses a weight update to tensor-parallel ranks only, so that new "
            "weights reach one pipeline stage; raise --rollout-num-gpus-per-engine without it"
        )
    tensor = size // stages
    if tensor % experts:
        yield (
            f"--sglang-ep-size {experts} does not divide the {tensor} tensor-parallel ranks of an engine "
            "(--rollout-num-gpus-per-engine); choose a divisor"
        )
    if v.sglang.get("enable_dp_attention"):
        if v.device == "cpu":
            yield "--sglang-enable-dp-attention needs --device cuda: SGLang's DP attention allocates memory on a GPU"
        if tensor % replicas:
            yield (
                f"--sglang-dp-size {replicas} does not divide the {tensor} tensor-parallel ranks of an engine "
                "(--rollout-num-gpus-per-engine); choose a divisor"
            )
            return
        tensor //= replicas
    elif replicas > 1:
        yield (
            f"--sglang-dp-size {replicas} without --sglang-enable-dp-attention would be {replicas} engines in one, "
            "which SGLang cannot give new weights; add that flag, or have more engines: their number is "
            "--rollout-num-gpus divided by --rollout-num-gpus-per-engine"
        )
    heads = (model_shape(v.hf_checkpoint) or {}).get("num_attention_heads")
    if heads and heads % tensor:
        yield (
            f"--rollout-num-gpus-per-engine {size} does not divide the model's num_attention_heads {heads} among the "
            f"{tensor} ranks that share attention; choose a divisor of it"
        )


@rule
def _quantized_engines(v: Values) -> Iterator[str]:
    method = v.sglang.get("quantization")
    if v.needs_engines and v.needs_trainer and not v.rollout_external and method is not None:
        yield (
            f"--sglang-quantization {method}: SGLang quantises weights when it starts, and not those of an update; "
            "drop it"
        )


@rule
def _speculation(v: Values) -> Iterator[str]:
    algorithm = v.sglang.get("speculative_algorithm")
    if v.needs_engines and v.needs_trainer and not v.rollout_external and has_draft(algorithm):
        yield (
            f"--sglang-speculative-algorithm {algorithm}: its draft model gets no new weights, or the target's by "
            "mistake, and loses its own where the engine's memory is released, so that hardly a draft would be "
            "accepted; drop it, or give NGRAM, which has none"
        )


@rule
def _context(v: Values) -> Iterator[str]:
    if not v.needs_engines:
        return
    if overridden(v) is None:
        yield f"--sglang-json-model-override-args is not a JSON object: {v.sglang['json_model_override_args']}"
    given = v.sglang.get("context_length")
    model, context = model_context(v), engine_context(v)
    if given is not None and context is None:
        yield f"--sglang-context-length {given} is no number of tokens, such as 32768, 32k or 32Ki"
    if context is None:
        return
    if model is not None and context > model and os.environ.get(ALLOW_LONGER, "0") in ("", "0"):
        yield (
            f"--sglang-context-length {given} is more than the {model} tokens of the model's context; give at most "
            f"that, or set the environment variable {ALLOW_LONGER}=1, which SGLang asks for"
        )
        return
    if context <= KEPT_BY_SGLANG + 1:
        yield f"--sglang-context-length {context} leaves no room: SGLang keeps {KEPT_BY_SGLANG} tokens of it; raise it"
    source = "the model's context (config.json)" if given is None else "--sglang-context-length"
    for flag, length in (
        ("--rollout-max-context-len", v.rollout_max_context_len),
        ("--eval-max-context-len", v.eval_max_context_len),
    ):
        if length is not None and length > context:
            yield f"{flag} {length} is more than the {context} tokens of {source}; give at most that, or leave it out"
            return  # of two equal ones, the other follows
