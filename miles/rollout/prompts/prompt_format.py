"""From a row of a prompt file to a sample: which column is what, and how the prompt becomes a text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Self, cast

from miles.config import RunConfig
from miles.rewards import built_in
from miles.rollout.chat_template import ChatTemplate, Message, normal_message
from miles.rollout.prompts.conversation import Conversations, Part
from miles.rollout.prompts.prompt_file import BadRow, Number, parse_json, plain
from miles.rollout.sessions.tool_calls import specs_of_path
from miles.utils.errors import UserError
from miles.utils.json_values import shown
from miles.utils.types import Sample


@dataclass(frozen=True)
class PromptFormat:
    """What the rows of a prompt file are made of.

    Attributes:
        input_key: column of the prompt: a string, or a list of chat messages, which needs apply_chat_template.
        label_key: column of the expected answer, a string or number, kept digit for digit as a string; None: no labels.
        metadata_key: column of a dict for rewards and custom code; may be absent.
        tool_key: column of the tools that the chat template offers to the model, a list of objects or the same as a
            text of JSON; may be absent. They stand in the sample's metadata too, under "tools".
        apply_chat_template: render chat messages (a string counts as one user message) and open the answer.
        chat_template: a Jinja template in place of the tokenizer's.
        chat_template_kwargs: handed to the template, such as {"enable_thinking": False}.
        keep_messages: keep the messages of a rendered prompt in the sample's metadata, under "messages", for agents,
            who send them themselves.
        tools: offered to the model by the chat template where a row has none of its own.
        built_in_rewards: whether built-in rewards score the rows, so that they must be able to use the labels.
        rm_type: the built-in reward of rows whose metadata names none.
        metadata_overrides: laid over each row's metadata later.
        conversations: what the assistant says in the messages is learned. The prompt is what stands before that; the
            parts behind it are kept in the sample's metadata, under "parts" (see miles.rollout.prompts.conversation).
    """

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    apply_chat_template: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    keep_messages: bool = False
    tools: list[dict[str, Any]] | None = None
    built_in_rewards: bool = False
    rm_type: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    conversations: bool = False

    @classmethod
    def from_config(cls, config: RunConfig, *, input_key: str, label_key: str | None) -> Self:
        """That of `config`, with these columns of prompt and label."""
        path = config.chat_template_path
        return cls(
            input_key=input_key,
            label_key=label_key,
            metadata_key=config.metadata_key,
            tool_key=config.tool_key,
            apply_chat_template=config.apply_chat_template,
            chat_template=None if path is None else Path(path).read_text(encoding="utf-8"),
            chat_template_kwargs=config.apply_chat_template_kwargs,
            keep_messages=config.custom_agent_function_path is not None,
            tools=specs_of_path(config),
            built_in_rewards=config.rm_type is not None and config.custom_rm_path is None,
            rm_type=config.rm_type,
            conversations=config.learns_conversations,
        )

    @property
    def columns(self) -> list[str]:
        """All that is read of a row."""
        return [key for key in (self.input_key, self.label_key, self.metadata_key, self.tool_key) if key is not None]

    def template_of(self, tokenizer: Any) -> ChatTemplate | None:
        """What renders the prompts; None where nothing does.

        Raises: ValueError if the tokenizer has no chat template where one is needed, or the template ignores an
            argument.
        """
        if not self.apply_chat_template:
            return None
        if self.chat_template is None and tokenizer.chat_template is None:
            raise UserError(
                "--apply-chat-template: the tokenizer has no chat template; give --chat-template-path, or drop it"
            )
        template = ChatTemplate(tokenizer, self.chat_template, self.chat_template_kwargs, "the chat template")
        ignored = [key for key in self.chat_template_kwargs if key not in template.source()]
        if ignored:
            raise UserError(f"--apply-chat-template-kwargs: the chat template has no {', '.join(ignored)}; drop it")
        if self.tools is not None and "tools" not in template.source(self.tools):
            raise UserError(
                "--generate-tool-specs-path: the chat template does not show tools to the model; give another by "
                "--chat-template-path"
            )
        return template

    def conversations_of(self, template: ChatTemplate | None, tokenizer: Any) -> Conversations | None:
        """What cuts conversations that are learned; None where none are. Raises as `Conversations`."""
        return Conversations(template, tokenizer) if self.conversations and template is not None else None

    def sample(
        self, row: dict[str, Any], template: ChatTemplate | None, conversations: Conversations | None = None
    ) -> Sample:
        """The sample of a row, without tokens.

        Args:
            template: what `template_of` gave.
            conversations: what `conversations_of` gave.

        Raises: BadRow if a column is missing, or isn't what it should be.
        """
        prompt = self._prompt(row)
        label = None if self.label_key is None else _label(row, self.label_key)
        metadata = _metadata(row, self.metadata_key)
        tools = self._tools(row, template)
        if tools is not None:
            if "tools" in metadata:
                raise BadRow(f"'tools' stands in {self.metadata_key!r} and in {self.tool_key!r} (--tool-key)")
            metadata["tools"] = tools
        if template is not None:
            if self.keep_messages:
                if "messages" in metadata:
                    raise BadRow(
                        f"'messages' stands in {self.metadata_key!r}, where an agent's prompt is kept; rename it"
                    )
                metadata["messages"] = prompt
            messages, shown = cast(list[Message], prompt), self.tools if tools is None else tools
            if conversations is not None:
                prompt, metadata["parts"] = _first_and_rest(messages, shown, conversations, metadata)
            else:
                prompt = _render(messages, shown, template)
        return Sample(prompt=prompt, label=label, metadata=metadata)

    def check_label(self, sample: Sample) -> None:
        """Raise BadRow if the built-in reward that will score the sample can't use its label."""
        chosen = (sample.metadata | self.metadata_overrides).get("rm_type")
        name = self.rm_type if chosen is None else chosen
        if not self.built_in_rewards or name is None:
            return
        try:
            built_in(name).check_label(sample.label)
        except UserError as error:
            raise BadRow(str(error)) from error

    def _prompt(self, row: dict[str, Any]) -> str | list[Message]:
        key = self.input_key
        if row.get(key) is None:
            raise BadRow(f"no {key!r} (--input-key); the row has {', '.join(map(repr, row)) or 'no keys'}")
        prompt = row[key]
        if isinstance(prompt, str) and not isinstance(prompt, Number):
            if not prompt.strip():
                raise BadRow(f"{key!r} is empty")
            _check_unicode(prompt, key)
            return [{"role": "user", "content": prompt}] if self.apply_chat_template else prompt
        if not isinstance(prompt, list):
            raise BadRow(f"{key!r} is {shown(plain(prompt))}; a string or a list of chat messages is allowed")
        if not self.apply_chat_template:
            raise BadRow(f"{key!r} is a list of chat messages, which needs --apply-chat-template")
        if not prompt:
            raise BadRow(f"{key!r} must be a list of at least one message, each with a 'role' and its content")
        return [_message(message, f"message {number} of {key!r}") for number, message in enumerate(plain(prompt), 1)]

    def _tools(self, row: dict[str, Any], template: ChatTemplate | None) -> list[dict[str, Any]] | None:
        key = self.tool_key
        tools = row.get(key)
        if tools is None:
            return None
        if isinstance(tools, str) and not isinstance(tools, Number):
            tools = parse_json(tools)
        tools = plain(tools)
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BadRow(
                f"{key!r} (--tool-key) is {shown(plain(tools))}; a list of objects, or one as JSON, is allowed"
            )
        if not tools:
            return None
        if template is None:
            raise BadRow(f"{key!r} (--tool-key) holds tools, which need --apply-chat-template")
        if "tools" not in template.source(tools):
            raise BadRow(f"{key!r} (--tool-key) holds tools, which the chat template does not show to the model")
        return tools


def _message(message: Any, where: str) -> Message:
    try:
        normal = normal_message(message)
    except UserError as error:
        raise BadRow(f"{where}: {error}") from error
    for call in normal.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            is_object = isinstance(parse_json(arguments), dict)
        except BadRow:
            is_object = False
        if not is_object:
            raise BadRow(f"{where}: the arguments of the call of {name} are no JSON object: {arguments!r:.80}")
    return normal


def _render(messages: list[Message], tools: list[dict[str, Any]] | None, template: ChatTemplate) -> str:
    try:
        text = template.prompt(messages, tools)
    except UserError as error:
        raise BadRow(str(error)) from error
    _check_unicode(text, "prompt")
    return text


def _first_and_rest(
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    conversations: Conversations,
    metadata: Mapping[str, Any],
) -> tuple[str, list[Part]]:
    if "parts" in metadata:
        raise BadRow(
            "'parts' stands in the metadata (--metadata-key), where those of a conversation are kept; rename it"
        )
    try:
        (first, _), *rest = conversations.parts(messages, tools)
    except UserError as error:
        raise BadRow(str(error)) from error
    for text in (first, *(text for text, _ in rest)):
        _check_unicode(text, "prompt")
    return first, rest


def _label(row: dict[str, Any], key: str) -> str:
    label = row.get(key)
    if label is None:
        raise BadRow(f"no label {key!r} (--label-key); the row has {', '.join(map(repr, row))}")
    if isinstance(label, bool) or not isinstance(label, str | int | float | Decimal):
        raise BadRow(f"the label {key!r} is {shown(plain(label))}; a string or a number is allowed")
    if isinstance(label, float) and not math.isfinite(label):
        raise BadRow(f"the label {key!r} is {label}")
    label = str(label)
    _check_unicode(label, key)
    return label


def _metadata(row: dict[str, Any], key: str) -> dict[str, Any]:
    metadata = row.get(key)
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise BadRow(f"{key!r} (--metadata-key) is {shown(plain(metadata))}; an object is allowed")
    metadata = plain(metadata)
    _check_json(metadata, key)
    return metadata


def _check_json(value: Any, key: str) -> None:
    """What a parquet file can hold and JSON, through which metadata travels into checkpoints, cannot is a bad row."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise BadRow(f"{key!r} (--metadata-key) has the key {shown(plain(name))}; keys are strings")
            _check_json(item, key)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, key)
    elif not isinstance(value, str | int | float | None):
        raise BadRow(f"{key!r} (--metadata-key) holds {shown(plain(value))}; write it as a string or a number")


def _check_unicode(text: str, key: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"{key!r} holds half a surrogate pair at character {error.start}: not Unicode text") from error
