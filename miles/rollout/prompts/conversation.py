"""Conversations to learn: which part of a chat template's text the model would have written."""

from collections.abc import Sequence
from typing import Any

from miles.rollout.chat_template import MARK, ChatTemplate, Message
from miles.utils.errors import UserError

# In a message of the assistant, 0: it is context, and not learned.
MASK_KEY = "step_loss_mask"

Part = tuple[str, bool]


class Conversations:
    """Cuts conversations into what stands there and what is learned: all that the assistant says, and its turns' ends.

    A turn begins where the template opens the model's turn, and ends with the template's end of a turn, which is the
    special token behind a message. Where a template writes a turn otherwise once others follow it, as those do that
    leave out earlier reasoning, what it writes is learned.

    Args:
        template: renders the messages.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: the template puts no special token behind a turn.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Any):
        self._template = template
        user, turn = {"role": "user", "content": "."}, {"role": "assistant", "content": MARK}
        before = template.render([user], None, opened=False)
        past = template.render([user, turn, user], None, opened=False)
        self._opening = past[len(before) : past.index(MARK)] if past.startswith(before) and MARK in past else ""
        behind = template.render([user, turn], None, opened=False).partition(MARK)[2]
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        ends = [(behind.find(text), text) for text in special if text in behind]
        if not ends:
            raise UserError(
                f"--loss-type sft_loss: {template.name} puts no special token behind a turn of the assistant, so that "
                "its end can't be learned; give another by --chat-template-path, or a column of answers by --label-key"
            )
        self._end = min(ends)[1]

    def parts(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Part]:
        """The text of a conversation in parts, and of each whether it is learned; the first is not, the last is.

        Args:
            messages: normal messages. Those of the assistant are learned, unless one has `step_loss_mask` 0.

        Raises:
            ValueError: none is to be learned, or the template does not show where a turn begins or ends.
        """
        masks = [_mask(message) for message in messages]
        messages = [{key: value for key, value in message.items() if key != MASK_KEY} for message in messages]
        if not any(masks):
            raise UserError(
                "no message of the assistant is to be learned; with answers in a column of their own give --label-key"
            )
        whole = self._template.render(messages, tools, opened=False)
        parts: list[Part] = []
        done = 0
        for place in [place for place, mask in enumerate(masks) if mask]:
            start = self._start(whole, messages[:place], tools)
            end = whole.find(self._end, start) + len(self._end)
            if start < done or end < start or self._end in str(messages[place]):
                raise UserError(f"{self._template.name} does not show where message {place + 1} begins and ends")
            parts += [(whole[done:start], False), (whole[start:end], True)]
            done = end
        return parts

    def _start(self, whole: str, before: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> int:
        """Where the model's turn behind `before` begins; -1 where the text is another with it."""
        opened = self._template.render(before, tools, opened=True)
        if whole.startswith(opened):
            return len(opened)
        # What opens a turn may be more than what stands before one in the past: an empty thought.
        told = self._template.render(before, tools, opened=False) + self._opening
        return len(told) if self._opening and whole.startswith(told) else -1


def _mask(message: Message) -> bool:
    mask = message.get(MASK_KEY, 1)
    if mask not in (0, 1):
        raise UserError(f"{MASK_KEY} is {mask!r}; 0 and 1 are allowed")
    return message["role"] == "assistant" and bool(mask)
