"""How a chat template continues a conversation of which the tokens exist: only what is new becomes tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.config import RunConfig
from miles.rollout.answers import without_end
from miles.rollout.chat_template import MARK, ChatTemplate, Message
from miles.utils.errors import UserError


class NotAnExtension(UserError):
    """The chat template writes earlier messages otherwise once later ones follow."""


class ChatFormat:
    """Turns messages into tokens by a chat template.

    What the model wrote stays as the ids that it wrote. The text of the messages behind it is found as the difference
    between two renderings of a stand-in conversation, with and without them, so it depends neither on how the model
    wrote its turn nor on how long the conversation is.

    Args:
        tokenizer: a Hugging Face tokenizer.
        end_ids: ids with which the model ends its turn.
        chat_template: a Jinja template in place of the tokenizer's.
        kwargs: handed to the template.
        name: of the template, for messages.

    Raises:
        ValueError: there is no template.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: frozenset[int],
        *,
        chat_template: str | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str = "the tokenizer's chat template",
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._end_texts = [tokenizer.decode([end]) for end in sorted(end_ids)]
        self._template = ChatTemplate(tokenizer, chat_template, kwargs, name)

    @classmethod
    def from_config(cls, config: RunConfig, tokenizer: Any, end_ids: frozenset[int]) -> "ChatFormat":
        """That of the run's prompts."""
        path = config.chat_template_path
        kwargs = config.apply_chat_template_kwargs
        if path is None:
            return cls(tokenizer, end_ids, kwargs=kwargs, name=f"the chat template of {config.hf_checkpoint}")
        template = Path(path).read_text(encoding="utf-8")
        return cls(tokenizer, end_ids, chat_template=template, kwargs=kwargs, name=f"--chat-template-path {path}")

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """The tokens of a whole conversation of normal messages, up to where the model's next turn begins.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self._ids(self._template.prompt(messages, tools))

    def follow(self, last_id: int, new: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """The tokens behind a turn that the model wrote.

        They are its end where the model left that out, what the template puts there, the messages `new`, and the
        opening of the model's next turn.

        Args:
            last_id: the last token that the model wrote.
            new: normal messages of others than the model; results of tools first.

        Raises:
            NotAnExtension: with these messages behind it the template writes the model's turn otherwise.
            ValueError: the template refuses the messages.
        """
        results = [message for message in new if message["role"] == "tool"]
        before = [{"role": "user", "content": "."}, _stand_in(results)]
        turn = self._template.render(before, tools, opened=False)
        whole = self._template.render([*before, *new], tools, opened=True)
        written = turn.rfind(MARK) + len(MARK)
        if MARK not in turn or not whole.startswith(turn):
            raise NotAnExtension(
                f"{self._template.name} does not keep an assistant's message as it was once "
                f"{' and '.join(dict.fromkeys(message['role'] for message in new))} messages follow it: conversations "
                "can't be continued by their token ids; give another one by --chat-template-path"
            )
        ends = [place for place in (turn.find(end, written) for end in self._end_texts) if place >= 0]
        # Where the template ends no turn, the next one's opening does: the model writes that.
        ids = self._ids(whole[min(ends, default=len(turn)) :])
        if last_id in self._end_ids and (ends or ids[:1] == [last_id]):
            return ids[1:]
        return ids

    def text(self, ids: Sequence[int], stop_ids: Sequence[int] = ()) -> str:
        """What the model wrote in a turn, special tokens too, but for one that ended it."""
        shown = without_end(ids, self._tokenizer, self._end_ids, stop_ids)
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _stand_in(results: Sequence[Message]) -> Message:
    """A turn of the model that these results of tools answer, with reasoning for templates that leave that out."""
    message: Message = {"role": "assistant", "content": f"<think>\n.\n</think>\n\n{MARK}"}
    if results:
        message["tool_calls"] = [
            {
                "id": result["tool_call_id"],
                "type": "function",
                "function": {"name": result.get("name") or "f", "arguments": json.dumps({"x": MARK})},
            }
            for result in results
        ]
    return message
