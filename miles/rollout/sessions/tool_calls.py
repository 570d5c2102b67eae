"""Tools: which there are, the calls in what a model wrote, and what the user's function makes of them."""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.config import RunConfig
from miles.config.names import nearest
from miles.utils.dotted_path import load_function, load_object
from miles.utils.errors import UserError
from miles.utils.types import Sample

logger = logging.getLogger(__name__)

# Under this key of a sample's metadata is how far its conversation is, for JSON: `turns`, `calls` and `failed_calls` so
# far, `turn_start`, the place in the response where the model's latest turn begins, and `answer`, the text of the turn
# that called nothing; None before there is one.
STATE = "miles_multi_turn"

# A tool that hangs would hold up the end of every rollout.
TOOL_TIMEOUT_SECONDS = 60.0

ExecuteTool = Callable[[str, dict[str, Any], Sample], Awaitable[str]]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str

    def as_message_part(self) -> dict[str, Any]:
        """How it stands in the `tool_calls` of an assistant's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ParsedTurn:
    """What a model wrote: the text in front of its calls (all of it where there are none), and the calls.

    `unreadable`: it holds what opens a call, but none could be read.
    """

    text: str
    calls: list[ToolCall]
    unreadable: bool = False


class CallParser:
    """Finds the calls in a text by one of SGLang's parsers.

    Args:
        name: one that SGLang's --tool-call-parser knows.
        tokenizer: some parsers look at it.

    Raises:
        ValueError: there is no such parser.
    """

    def __init__(self, name: str | None, tokenizer: Any) -> None:
        # Imported here: it takes a second that only runs with tools need.
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        known = FunctionCallParser.ToolCallParserEnum
        if name is None:
            raise UserError(f"--generate-tool-call-parser is not given; SGLang has {', '.join(sorted(known))}")
        if name not in known:
            raise UserError(
                f"--generate-tool-call-parser {name}: SGLang has no such parser{nearest(name, known)}; it has "
                f"{', '.join(sorted(known))}"
            )
        self._name = name
        self._tokenizer = tokenizer
        # It says a line about each call that can't be read; the caller counts them.
        logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)

    def check(self, tools: Sequence[dict[str, Any]]) -> None:
        """Raise UserError if SGLang can't take these schemas."""
        from pydantic import ValidationError
        from sglang.srt.entrypoints.openai.protocol import Tool

        for tool in tools:
            try:
                Tool.model_validate(tool)
            except ValidationError as error:
                raise UserError(f"SGLang can't take the tool {tool!r:.200}: {error}") from error

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        """The calls in `text`, of known tools and of unknown ones; arguments are not checked.

        A reasoning in front, up to the last `</think>`, holds no calls.
        """
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        head, closing, body = text.rpartition("</think>")
        parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], self._name, self._tokenizer)
        # A call of a tool that there is not is a call too: the model is told so.
        with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
            try:
                plain, items = parser.parse_non_stream(body)
            except Exception as error:  # foreign code on what a model wrote
                logger.debug("the parser %s can't read %r: %r", self._name, body, error)
                plain, items = body, []
        if not items:
            return ParsedTurn(text, [], unreadable=parser.has_tool_call(body))
        calls = [ToolCall(f"call_{secrets.token_hex(8)}", item.name or "", item.parameters) for item in items]
        return ParsedTurn(head + closing + plain, calls)


def specs_of_path(config: RunConfig) -> list[dict[str, Any]] | None:
    """The schemas of --generate-tool-specs-path; None where it is not given, ValueError if they can't be used."""
    path = config.generate_tool_specs_path
    if path is None:
        return None
    return checked_tools(f"--generate-tool-specs-path {path}", load_object("--generate-tool-specs-path", path))


def tools_of(config: RunConfig, sample: Sample) -> list[dict[str, Any]]:
    """The schemas of the tools that a sample may call: its row's own, else those of --generate-tool-specs-path.

    Raises:
        ValueError: there are none, or they are no list of such schemas.
    """
    if "tools" in sample.metadata:
        return checked_tools(f"the tools of sample {sample.index}", sample.metadata["tools"])
    specs = specs_of_path(config)
    if specs is None:
        raise UserError(
            f"sample {sample.index} has no tools: its row has no column {config.tool_key!r} (--tool-key), and "
            "--generate-tool-specs-path is not given"
        )
    return specs


def checked_tools(what: str, tools: Any) -> list[dict[str, Any]]:
    """`tools`, if they are a list of OpenAI's function schemas.

    Raises:
        ValueError: they are not; `what` says whose they are.
    """
    example = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
    if not isinstance(tools, list | tuple) or not tools:
        raise UserError(f"{what} must be a list of at least one {example}, not {tools!r:.100}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{what} must each be {example}, not {tool!r:.100}")
    return list(tools)


def load_execute_tool(config: RunConfig) -> ExecuteTool:
    """The function of --generate-execute-tool-function-path; ValueError if it can't be used."""
    flag = "--generate-execute-tool-function-path"
    path = config.generate_execute_tool_function_path
    if path is None:
        raise UserError(f"{flag} is not given: nothing executes the calls of tools")
    return load_function(flag, path, "name", "arguments", "sample", is_async=None)


async def execute(
    function: ExecuteTool, calls: Sequence[ToolCall], tools: Sequence[dict[str, Any]], sample: Sample
) -> tuple[list[dict[str, Any]], int]:
    """Execute the calls of a turn, one after the other: their messages, and how many of them failed.

    An unknown tool, arguments that are no JSON object, an exception of the function, and what is not done within
    `TOOL_TIMEOUT_SECONDS` for all of them are failures: the message says so to the model.

    Raises:
        ValueError: the function returned no text.
    """
    deadline = asyncio.get_running_loop().time() + TOOL_TIMEOUT_SECONDS
    names = [tool["function"]["name"] for tool in tools]
    messages, failed = [], 0
    for call in calls:
        content, problem = await _execute(function, call, names, sample, deadline)
        if problem is not None:
            failed += 1
            content = f"The call of {call.name} failed: {problem}"
            logger.info("sample %s: %r", sample.index, content)  # a model wrote parts of it
        messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
    return messages, failed


async def _execute(
    function: ExecuteTool, call: ToolCall, names: list[str], sample: Sample, deadline: float
) -> tuple[str, str | None]:
    """The result, and what went wrong, or None."""
    if call.name not in names:
        return "", f"there is no tool {call.name!r}; there are {', '.join(names)}"
    arguments = _object(call.arguments)
    if arguments is None:
        return "", f"the arguments are no JSON object: {call.arguments:.200}"
    try:
        async with asyncio.timeout_at(deadline) as limit:
            content = await function(call.name, arguments, sample)
    except Exception as error:  # the user's code; counted by the caller
        if limit.expired():
            return "", f"no result within {TOOL_TIMEOUT_SECONDS:g} seconds"
        cause = error.__cause__ or error  # flag and path tell the model nothing
        return "", f"{type(cause).__name__}: {cause}"
    if not isinstance(content, str):
        raise UserError(
            f"--generate-execute-tool-function-path returned {content!r:.80} ({type(content).__name__}) for "
            f"{call.name}; it must return the text of the result"
        )
    return content, None


def tool_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the samples that are conversations with tools; empty where none is."""
    states = [sample.metadata[STATE] for sample in samples if STATE in sample.metadata]
    if not states:
        return {}
    names = {"rollout/turns": "turns", "rollout/tool_calls": "calls", "rollout/failed_tool_calls": "failed_calls"}
    return {metric: sum(state[key] for state in states) / len(states) for metric, key in names.items()}


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a model wrote it: too many digits, too deep
        return None
    return value if isinstance(value, dict) else None
