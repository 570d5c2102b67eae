"""Chat messages as texts: the one form that all messages get, and what a chat template wants of them.

The rows of prompt files and the requests of agents both come through here, so that equal messages become equal tokens.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from miles.utils.errors import UserError

# In stand-ins for what a model wrote: no template has it, and no template changes it.
MARK = "mIlEsMaRk"

Message = dict[str, Any]


def normal_message(message: Any) -> Message:
    """A message in the form that all messages get: content is a text, arguments of calls are JSON, null keys go.

    No content becomes an empty text; text parts are put together as they are.

    Raises:
        ValueError: it is no message, or holds more than text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError("a message must be an object with a 'role', which is a text, and its content")
    normal = {**_without_nulls(message), "content": _text(message.get("content"))}
    calls = normal.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise UserError(f"tool_calls must be a list, not {calls!r:.80}")
    if calls:
        normal["tool_calls"] = [_call(call) for call in calls]
    return normal


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"content must be a text or a list of text parts, not {content!r:.80}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"a part of type {kind!r:.40}" if isinstance(kind, str) and kind != "text" else f"{part!r:.80}"
            raise UserError(f"content holds {what}; only text is understood: {{'type': 'text', 'text': ...}}")
    return "".join(part["text"] for part in content)


def _call(call: Any) -> dict[str, Any]:
    call = _without_nulls(call) if isinstance(call, Mapping) else {}
    nested = isinstance(call.get("function"), Mapping)
    function = _without_nulls(call["function"]) if nested else {key: call[key] for key in call if key in _OF_FUNCTION}
    arguments = function.get("arguments", {})
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(function.get("name"), str) or not isinstance(arguments, str):
        raise UserError(
            "each of tool_calls must have a function with a name, which is a text, and arguments, an object or its JSON"
        )
    if not isinstance(call.get("id", ""), str):
        raise UserError(f"the id of a tool call must be a text, not {call['id']!r:.80}")
    rest = {key: value for key, value in call.items() if nested or key not in _OF_FUNCTION}
    return {**rest, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}}


_OF_FUNCTION = ("name", "arguments")


@dataclass(frozen=True)
class _Form:
    """How a template wants messages.

    Attributes:
        parts: content is a list of parts, not a text.
        json: arguments of calls are JSON, not objects.
        no_text: the content of a message that only calls.
        shows_calls, beside_text: calls are seen in the text at all, and where the message has a text too.
    """

    parts: bool = False
    json: bool = False
    no_text: str | None = ""
    shows_calls: bool = True
    beside_text: bool = True

    def of(self, message: Message) -> Message:
        """A normal message in this form."""
        calls = message.get("tool_calls")
        content: Any = message["content"]
        if not content and calls:
            content = self.no_text
        elif self.parts:
            content = [{"type": "text", "text": content}]
        message = {**message, "content": content}
        if calls and not self.json:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
                for call in calls
            ]
        return message


def _arguments(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):  # a model wrote it: too many digits, too deep
        return arguments


class ChatTemplate:
    """Renders messages in the form that the template wants, which is found by rendering stand-ins, once.

    Most templates look into the arguments of calls or write them as JSON, and get objects; those that join them to
    texts get JSON. Some show calls only where the content is null, some take contents only in parts.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: Jinja, in place of the tokenizer's.
        kwargs: handed to the template.
        name: of the template, for messages.

    Raises:
        ValueError: there is no template.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        name: str = "the tokenizer's chat template",
    ) -> None:
        if template is None and tokenizer.chat_template is None:
            raise UserError("the tokenizer has no chat template; give --chat-template-path")
        self._tokenizer = tokenizer
        self._template = template
        self._kwargs = dict(kwargs or {})
        self.name = name

    def source(self, tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The Jinja that renders messages with these tools."""
        return self._tokenizer.get_chat_template(self._template, None if tools is None else list(tools))

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> str:
        """The text of a whole conversation of normal messages, up to where the model's next turn begins.

        Raises:
            ValueError: the template refuses the messages, or does not show the calls in them.
        """
        for message in messages:
            if "tool_calls" in message and not (
                self._form.beside_text if message["content"] else self._form.shows_calls
            ):
                also = " and a text, beside which it does not show them" if self._form.shows_calls else ""
                raise UserError(
                    f"{self.name} does not show the model all calls of tools: a message has tool_calls{also}; give "
                    "another by --chat-template-path"
                )
        return self.render(messages, tools, opened=True)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, opened: bool) -> str:
        """The text of normal messages, with the opening of the model's next turn or without.

        Raises:
            ValueError: the template refuses the messages.
        """
        try:
            return self._rendered(messages, tools, opened, self._form)
        except _REFUSALS as error:
            raise UserError(f"{self.name} refuses the messages: {error}") from error

    @cached_property
    def _form(self) -> _Form:
        user = {"role": "user", "content": MARK}
        parts = not self._shown([user], _Form(), MARK) and self._shown([user], _Form(parts=True), MARK)
        arguments = {"x": MARK}
        function = {"name": "f", "arguments": json.dumps(arguments)}
        # Mistral's template wants ids of nine letters or digits.
        calls = [{"id": "call00000", "type": "function", "function": function}]

        def calling(content: str) -> list[Message]:
            return [{"role": "user", "content": "."}, {"role": "assistant", "content": content, "tool_calls": calls}]

        bare, beside = calling(""), calling(".")
        for no_text, as_json in itertools.product(("", None), (False, True)):
            form = _Form(parts, as_json, no_text)
            # Not as Python writes an object, nor as JSON within JSON.
            if self._shown(bare, form, MARK, str(arguments), f'\\"{MARK}'):
                return dataclasses.replace(form, beside_text=self._shown(beside, form, MARK))
        return _Form(parts, shows_calls=False, beside_text=False)

    def _shown(self, messages: list[Message], form: _Form, what: str, *wrong: str) -> bool:
        try:
            text = self._rendered(messages, None, False, form)
        except _REFUSALS:
            return False
        return what in text and not any(sign in text for sign in wrong)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, opened: bool, form: _Form
    ) -> str:
        return self._tokenizer.apply_chat_template(
            [form.of(message) for message in messages],
            tools=None if tools is None else list(tools),
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=opened,
            **self._kwargs,
        )


# What Jinja raises, and Python within what a template calls.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError)
