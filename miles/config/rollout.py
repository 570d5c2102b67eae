"""Generation: sampling parameters and engine limits."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from miles.config.context_length import KEPT_BY_SGLANG, engine_context, longest_context
from miles.config.effect import NotWith, OnlyWith, engines_run
from miles.config.section import Derived, Section, derives, rule
from miles.config.values import Values
from miles.hf.shape import model_shape
from miles.utils.errors import UserError

_RUNS = "for both name a router that runs already"


def _no_empty_text(texts: list[str] | None) -> list[str] | None:
    if texts and "" in texts:
        raise UserError("an empty text ends every response at its first token; leave it out")
    return texts


def _no_negative_id(ids: list[int] | None) -> list[int] | None:
    if ids and min(ids) < 0:
        raise UserError("token ids count from 0")
    return ids


StopTexts = Annotated[list[str] | None, AfterValidator(_no_empty_text)]
StopIds = Annotated[list[int] | None, AfterValidator(_no_negative_id)]


class RolloutConfig(Section):
    title: ClassVar[str] = "Rollout"

    rollout_temperature: float = Field(
        1.0, ge=0, description="Sampling temperature; the trainer divides its logits by it too."
    )
    rollout_top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling: the share of probability kept.")
    rollout_top_k: int = Field(-1, ge=-1, description="Sample among this many likeliest tokens; -1: among all.")
    rollout_max_context_len: int | None = Field(
        None,
        gt=1,
        description="Most tokens of prompt and response together. Unset: the engine's context, less 7 tokens that "
        "SGLang keeps.",
    )
    rollout_max_response_len: int | None = Field(
        None, gt=0, description="Most tokens of a response. Required where engines run."
    )
    rollout_stop: StopTexts = Field(None, description="Texts that end a response; the one that came is part of it.")
    rollout_stop_token_ids: StopIds = Field(None, description="Token ids that end a response.")
    rollout_skip_special_tokens: bool = Field(False, description="Leave special tokens out of the response's text.")
    sglang_server_concurrency: int = Field(512, gt=0, description="Samples in flight at most, for each engine.")
    sglang_router_policy: Annotated[
        Literal["cache_aware", "power_of_two", "round_robin", "random"] | None,
        NotWith("--sglang-router-ip", "which names a router that runs already"),
    ] = Field(
        None,
        description="Start sglang-router in front of the engines, with this policy. Unset: Miles itself sends each "
        "group of samples to the engine with the fewest in flight.",
    )
    sglang_router_ip: Annotated[str | None, OnlyWith("--sglang-router-port", _RUNS)] = Field(
        None,
        description="Address of an sglang-router that runs already: Miles adds its engines to it and takes them out "
        "at the end.",
    )
    sglang_router_port: Annotated[int | None, OnlyWith("--sglang-router-ip", _RUNS)] = Field(
        None, gt=0, lt=65536, description="Port of --sglang-router-ip."
    )
    sglang_router_request_timeout_secs: Annotated[
        int, OnlyWith("--sglang-router-policy", where=engines_run, warns=True)
    ] = Field(14400, gt=0, description="Seconds after which a router that Miles started gives up a request.")
    rollout_engine_start_timeout: float = Field(
        600.0, gt=0, description="Seconds that an engine may take until it answers its first health check."
    )
    rollout_health_check_interval: float = Field(
        10.0, gt=0, description="Seconds between two health checks of an engine: a question to its scheduler."
    )
    rollout_health_check_timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds after which an engine that does not answer a health check is named in the log; its "
        "requests go to others that do, until it answers again.",
    )
    rollout_health_check_first_wait: float = Field(
        0.0, ge=0, description="Seconds from an engine's start to its first health check."
    )
    rollout_request_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds that one generation request may take, a whole group and its wait within the engine; then "
        "it counts as failed. Unset: 1800, and what --sglang-server-concurrency longest responses take at 2,000 tokens "
        "a second.",
    )
    rollout_request_retries: int = Field(
        3,
        ge=0,
        description="Times that a request is sent again after it failed, got no usable answer, or was aborted by "
        "the engine.",
    )
    max_logprob_abs_diff: float = Field(
        0.05,
        gt=0,
        description="Bound of the mean |trainer - engine| log-probability after the first sync; above it, stop.",
    )


@derives("eval_max_prompt_len", "eval_max_context_len")
def _eval_lengths(v: Values) -> Iterator[Derived]:
    # Before the limit of rollouts that is derived, which does not become one of evaluations.
    for name in ("max_prompt_len", "max_context_len"):
        given = getattr(v, f"rollout_{name}")
        if getattr(v, f"eval_{name}") is None and given is not None:
            yield f"eval_{name}", given, "--rollout-" + name.replace("_", "-")


@derives("rollout_max_context_len", "eval_max_context_len")
def _context(v: Values) -> Iterator[Derived]:
    longest = longest_context(v) if v.needs_engines else None
    if longest is None:
        return
    for name in ("rollout_max_context_len", "eval_max_context_len"):
        given = getattr(v, name)
        # More than the context is refused.
        if given is None or longest < given <= longest + KEPT_BY_SGLANG:
            reason = f"{engine_context(v)} tokens of context, of which SGLang keeps {KEPT_BY_SGLANG}"
            yield name, longest, reason


@derives("rollout_max_prompt_len")
def _prompt_length(v: Values) -> Iterator[Derived]:
    if v.rollout_max_prompt_len is None and v.rollout_max_context_len is not None:
        yield "rollout_max_prompt_len", v.rollout_max_context_len - 1, "one token less than --rollout-max-context-len"


@derives("rollout_request_timeout")
def _request_timeout(v: Values) -> Iterator[Derived]:
    """Long enough for an engine that is full of longest responses: dead and hung engines are found in other ways."""
    if v.rollout_request_timeout is None:
        longest = max(v.rollout_max_response_len or 0, v.eval_max_response_len or 0)
        seconds = 1800.0 + v.sglang_server_concurrency * longest / 2000
        reason = f"1800 s, and {v.sglang_server_concurrency} responses of {longest} tokens at 2,000 a second"
        if v.sglang_router_policy is not None and seconds > v.sglang_router_request_timeout_secs:
            seconds, reason = float(v.sglang_router_request_timeout_secs), "--sglang-router-request-timeout-secs"
        yield "rollout_request_timeout", seconds, reason


@rule
def _router(v: Values) -> Iterator[str]:
    seconds = v.sglang_router_request_timeout_secs
    if v.sglang_router_policy is not None and seconds < v.rollout_request_timeout:
        yield (
            f"--sglang-router-request-timeout-secs {seconds} is below --rollout-request-timeout "
            f"{v.rollout_request_timeout:g}: the router would give up first; raise it"
        )


@rule
def _room_for_responses(v: Values) -> Iterator[str]:
    if v.needs_engines and v.rollout_max_response_len is None:
        yield "--rollout-max-response-len is required: the most tokens of a response"
    context, prompt = v.rollout_max_context_len, v.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        yield (
            f"--rollout-max-prompt-len {prompt} leaves no room for a response within --rollout-max-context-len "
            f"{context}; at most {context - 1} is allowed"
        )


@rule
def _sampling(v: Values) -> Iterator[str]:
    if v.rollout_temperature == 0 and v.learns_from_samples and v.needs_trainer:
        yield (
            "--rollout-temperature 0 cannot be trained on: the trainer divides its logits by it, and all samples of a "
            "group would be equal; use 1.0 (--eval-temperature 0 evaluates greedily)"
        )
    if v.rollout_top_k == 0 or v.eval_top_k == 0:
        yield "--rollout-top-k and --eval-top-k are at least 1, or -1 for all tokens; 0 was given"


@rule
def _stop_ids(v: Values) -> Iterator[str]:
    yield from unknown_ids("--rollout-stop-token-ids", v.rollout_stop_token_ids, v.hf_checkpoint)


def unknown_ids(what: str, ids: list[int] | None, checkpoint: str) -> Iterator[str]:
    """What is wrong with token ids: those that the model has not never end anything, and can break an engine."""
    size = (model_shape(checkpoint) or {}).get("vocab_size")
    if size is None:
        return
    unknown = [str(token) for token in ids or () if token >= size]
    if unknown:
        yield f"{what}: the model has no token {', '.join(unknown)}, its vocabulary ends at {size - 1}; drop it"
