"""The part of OpenAI's chat completions that agents can use: what a request may say, and how it is answered."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles.rollout.chat_template import Message, normal_message
from miles.rollout.sessions.tool_calls import ParsedTurn, checked_tools
from miles.utils.errors import UserError

MODEL = "miles"

# What would draw other tokens than the trainer takes them to be: the run's values count, whatever a request says.
OF_THE_RUN = frozenset(("temperature", "top_p", "top_k", "min_p", "seed", "model"))
# Says nothing about the answer.
NO_EFFECT = frozenset(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"))
# What may be said as long as it says the usual.
ONLY = {
    "stream": (False,),
    "n": (1,),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
USED = frozenset(("messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop"))
ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
# What a message may have besides role, content and calls.
TEXTS = ("name", "tool_call_id", "reasoning_content")


class BadRequest(Exception):
    """A request that is refused. `code` is what OpenAI's `error.code` says, for programs."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next message of a conversation.

    Attributes:
        messages: as `plain_message` makes them.
        tools: that the model is shown; None: none.
        calls: whether calls of tools are looked for in the answer.
        max_tokens: most new tokens; None: as many as may be.
        stop: texts that end the answer.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    calls: bool
    max_tokens: int | None
    stop: list[str]


def read_request(body: Any) -> ChatRequest:
    """The request in a body of JSON.

    Raises:
        BadRequest: it lacks something, or asks for what is not done here.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(fields.keys() - USED - OF_THE_RUN - NO_EFFECT - ONLY.keys()):
        raise BadRequest(f"{', '.join(unknown)} can't be asked for here")
    for name, allowed in ONLY.items():
        if name in fields and fields[name] not in allowed:
            raise BadRequest(f"{name} is {fields[name]!r:.80}; here it may be {' or '.join(map(repr, allowed))}")
    tools = fields.get("tools") or None
    if tools is not None:
        try:
            tools = checked_tools("tools", tools)
        except UserError as error:
            raise BadRequest(str(error)) from error
    limits = [fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise BadRequest(f"max_tokens must be a positive integer, not {limits}")
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(f"stop must be a text or a list of texts, not {stop!r:.80}")
    return ChatRequest(
        _messages(fields.get("messages")),
        tools,
        tools is not None and fields.get("tool_choice") != "none",
        min(limits, default=None),
        stop,
    )


def plain_message(message: Any) -> Message:
    """A normal message with only what a chat template reads: two that differ in nothing else become equal.

    Raises:
        BadRequest: it is no message, or holds more than text.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"each of messages must be an object with a role of {', '.join(sorted(ROLES))}")
    try:
        normal = normal_message(message)
    except UserError as error:
        raise BadRequest(str(error)) from error
    plain: Message = {name: normal[name] for name in ("role", "content", *TEXTS) if name in normal}
    for name in TEXTS:
        if not isinstance(plain.get(name, ""), str):
            raise BadRequest(f"{name} must be a text, not {plain[name]!r:.80}")
    if plain["role"] == "tool" and "tool_call_id" not in plain:
        raise BadRequest("a tool's message must have the tool_call_id of the call that it answers")
    if "tool_calls" in normal:
        plain["tool_calls"] = [_plain_call(call) for call in normal["tool_calls"]]
    return plain


def reply_message(turn: ParsedTurn) -> Message:
    """The assistant's message of a turn."""
    message: Message = {"role": "assistant", "content": turn.text}
    if turn.calls:
        message["tool_calls"] = [call.as_message_part() for call in turn.calls]
    return message


def completion_body(message: Message, *, truncated: bool, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """The answer to a request, for JSON."""
    reason = "length" if truncated else "tool_calls" if "tool_calls" in message else "stop"
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        },
    }


def error_body(message: str, kind: str, code: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it, for JSON."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def models_body() -> dict[str, Any]:
    """The list of models: the one that is trained."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "miles"}]}


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")
    plain = [plain_message(message) for message in messages]
    if plain[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's; the model writes the one after a user's or a tool's")
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    if "id" not in call:
        raise BadRequest("each of tool_calls must have an id")
    function = {name: call["function"][name] for name in ("name", "arguments")}
    return {"id": call["id"], "type": "function", "function": function}
