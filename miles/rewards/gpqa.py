r"""`--rm-type gpqa`: the right letter of a multiple-choice question.

As in GPQA (Rein et al. 2023, https://arxiv.org/abs/2311.12022).

The answer is the first that is found of, in what follows the last </think> (or all of it, without one):
1. what the last \boxed or \fbox holds, if there is one: then nothing else counts;
2. the letter after the last "answer is", "answer:" or "choice is";
3. the last line, if it is nothing but a letter, or the only one that is a letter and its text, such as "B: Paris".
A letter may stand in (), [], **, \text{}, \mathbf{} and the like, and be followed by a mark and its text. It must be
the only one: "answer: A or B" and "answer: A good one" give none.
"""

import re
from typing import TYPE_CHECKING

from miles.rewards.answers import after_thinking, last_box, plain_signs
from miles.rewards.reward import Reward, label_of
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

_FONT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf|tt|bb|cal)|boldsymbol|bm|mbox|bf|rm)\s*\{|\{|\\bf\s|\\rm\s"
)
_LETTER = rf"(?:[*_`$\s]|{_FONT})*[(\[]?([A-Za-z])[)\]]?"
_ALONE = re.compile(rf"{_LETTER}[)\].:*_`$}}\s]*")
# Only a mark tells "B: 5 m" from a word, or from text that starts with A.
_WITH_TEXT = re.compile(rf"{_LETTER}(?:(?<=[)\]])|[*_`$}}]*[.:)])[*_`$}}\s\\]*\S.*", re.DOTALL)
_OTHER_OPTION = re.compile(r"(?<![A-Za-z])[A-Z](?:[)\]]|[:.](?=\s))")
_ANNOUNCED = re.compile(r"\b(?:answer|choice|option)\b\W{0,8}?(?:\s+is|\s*[:=])[:\s]*", re.IGNORECASE)
# After the letter: the end, or a mark. Between it and more text a word only if that is no second choice.
_FOLLOWED = re.compile(rf"{_LETTER}(?:[)\].:,;*_`$}}]+|\s+(?:because|since|as|with|for)\b|\s*(?:\n|$))")
_SECOND = re.compile(r"[)\].:,;*_`$}\s]*(?:(?:or|and|/|&|\||,)[\s(*\[]*)+[A-Z](?![\w'])")


async def gpqa_reward(config: "RunConfig", sample: "Sample") -> float:
    """1.0 if the response chooses the label's letter, else 0.0; case and what surrounds it aside.

    Raises:
        ValueError: the label is not one letter.
    """
    return float(find_choice(sample.response) == read_label(label_of(sample)))


def read_label(label: str) -> str:
    """The letter, in upper case.

    Raises:
        ValueError: it is not one.
    """
    box = last_box(label)
    letter = _ALONE.fullmatch(label.strip() if box is None else box)
    if letter is None:
        raise UserError(f"the label {label!r} is not the letter of a choice, such as B")
    return letter[1].upper()


def find_choice(text: str) -> str | None:
    """The letter that the text chooses, in upper case; None without one, or with more than one."""
    answer = after_thinking(text)
    text = plain_signs((text if answer is None else answer)[-2000:])
    if r"\boxed" in text or r"\fbox" in text:
        return _option(last_box(text) or "")
    announced = [match.end() for match in _ANNOUNCED.finditer(text)]
    if announced:
        letter = _FOLLOWED.match(text, announced[-1])
        if letter is None or not _is_letter(text, letter) or _SECOND.match(text, letter.end(1)):
            return None
        return letter[1].upper()
    options = [_option(line) for line in text.strip().splitlines()]
    if not options or options[-1] is None:
        return None
    line = text.strip().splitlines()[-1]
    alone = _ALONE.fullmatch(line.strip()) is not None
    return options[-1] if alone or sum(option is not None for option in options) == 1 else None


def _option(text: str) -> str | None:
    """The letter of a text that is a letter, or a letter with a mark behind it and its text, without a second one."""
    letter = _ALONE.fullmatch(text.strip())
    if letter is None:
        letter = _WITH_TEXT.fullmatch(text.strip())
        if letter is None or _SECOND.match(text.strip(), letter.end(1)):
            return None
        if _OTHER_OPTION.search(text.strip(), letter.end(1) + 1):
            return None
    return letter[1].upper()


def _is_letter(text: str, letter: re.Match[str]) -> bool:
    """Whether it is no word of its own: a lower-case letter counts in brackets only."""
    before = text[letter.start(1) - 1]
    return letter.group(1).isupper() or before in "([{*"


GPQA = Reward(name="gpqa", help="the letter of a choice", judge=gpqa_reward, read_label=read_label)
