"""Conversations: tools that are called between turns, and agents that ask an endpoint."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from miles.config.effect import OnlyWith
from miles.config.paths import FunctionPath
from miles.config.section import Section, rule
from miles.config.values import Values

MULTI_TURN = "miles.rollout.generate_hub.multi_turn.generate"
AGENT = "miles.rollout.generate_hub.agentic_tool_call.generate"
# An evaluation set may have a function of its own that reads them.
_CALLED = OnlyWith(
    "--custom-generate-function-path", f"such as {MULTI_TURN}", where=lambda v: v.eval_config is None, warns=True
)


class MultiTurnConfig(Section):
    title: ClassVar[str] = "Tools and agents"

    generate_max_turns: int = Field(16, gt=0, description="Most responses of the model in one conversation.")
    generate_tool_specs_path: FunctionPath | None = Field(
        None, description="List of the tools' JSON schemas, by dotted path, for rows that have no tools of their own."
    )
    generate_tool_call_parser: Annotated[str | None, _CALLED] = Field(
        None, description="How calls stand in the text: a name that SGLang's --tool-call-parser knows, such as qwen25."
    )
    generate_execute_tool_function_path: Annotated[FunctionPath | None, _CALLED] = Field(
        None,
        description="Executes a call: (name, arguments, sample) by dotted path, async or not, for the text of its "
        "result.",
    )
    custom_agent_function_path: Annotated[FunctionPath | None, _CALLED] = Field(
        None,
        description="An agent: (base_url, prompt, request_kwargs, metadata) by dotted path, async or not. It talks to "
        "the model at base_url, an OpenAI-compatible endpoint; a dict that it returns goes into the samples' metadata.",
    )
    session_server_ip: str = Field("127.0.0.1", description="Address that the endpoint for agents listens on.")
    session_server_port: int | None = Field(
        None, gt=0, lt=65536, description="Port of the endpoint for agents. Unset: a free one."
    )


@rule
def _multi_turn(v: Values) -> Iterator[str]:
    if v.custom_generate_function_path != MULTI_TURN or not v.needs_engines:
        return
    why = f"--custom-generate-function-path {MULTI_TURN} needs"
    if v.generate_tool_call_parser is None:
        yield f"{why} --generate-tool-call-parser, a name that SGLang's --tool-call-parser knows, such as qwen25"
    if v.generate_execute_tool_function_path is None:
        yield f"{why} --generate-execute-tool-function-path, an async function of (name, arguments, sample)"
    if not v.apply_chat_template:
        yield f"{why} --apply-chat-template: the results of tools are messages of a chat"
    yield from _context(v, why)


@rule
def _agent(v: Values) -> Iterator[str]:
    if v.custom_generate_function_path != AGENT or not v.needs_engines:
        return
    why = f"--custom-generate-function-path {AGENT} needs"
    if v.custom_agent_function_path is None:
        yield f"{why} --custom-agent-function-path, an async function of (base_url, prompt, request_kwargs, metadata)"
    yield from _context(v, why)


def _context(v: Values, why: str) -> Iterator[str]:
    if v.rollout_max_context_len is None:
        yield f"{why} --rollout-max-context-len, the most tokens of a conversation with all that is not the model's"


@rule
def _address(v: Values) -> Iterator[str]:
    if v.session_server_ip.strip("[]") in ("", "0.0.0.0", "::"):
        yield (
            f"--session-server-ip {v.session_server_ip!r} is every address of this machine; agents are told to ask "
            "there: give the one that they reach"
        )
