r"""`--rm-type gpqa`: the right letter of a multiple-choice question, as in GPQA (Rein et al. 2023,
https://arxiv.org/abs/2311.12022).

The answer is the first that is found of, in what follows the last </think> (or all of it, without one):
1. what the last \boxed or \fbox holds, if there is one: then nothing else counts;
2. the letter after the last "answer is", "answer:" or "choice is";
3. the last line, if it is nothing but a letter.
A letter may stand in (), [], ** or \text{}, and alone: "answer: A or B" and "answer: A good one" give none.
"""

import re

from miles.config import RunConfig
from miles.rewards.answers import after_thinking, last_box
from miles.utils.errors import UserError
from miles.utils.types import Sample

_LETTER = r"(?:[*_`$\s]|\\text\s*\{|\\mathrm\s*\{|\\textbf\s*\{)*[(\[]?([A-Za-z])[)\]]?"
_ALONE = re.compile(rf"{_LETTER}[)\].:*_`$}}\s]*")
_ANNOUNCED = re.compile(r"\b(?:answer|choice|option)\b\W{0,8}?(?:\s+is|\s*[:=])[:\s]*", re.IGNORECASE)
# After the letter: the end, or a mark. Between it and more text a word only if that is no second choice.
_FOLLOWED = re.compile(rf"{_LETTER}(?:[)\].:,;*_`$}}]+|\s+(?:because|since|as|with|for)\b|\s*(?:\n|$))")
_SECOND = re.compile(r"[)\].:,;*_`$}\s]*(?:(?:or|and|/|&|\||,)[\s(*\[]*)+[A-Z](?![\w'])")


async def gpqa_reward(config: RunConfig, sample: Sample) -> float:
    """1.0 if the response chooses the label's letter, else 0.0; case and what surrounds it aside.

    Raises: ValueError for a label that is not one letter.
    """
    label = _ALONE.fullmatch(sample.label.strip())
    if label is None:
        raise UserError(f"the label {sample.label!r} is not the letter of a choice, such as B")
    return float(find_choice(sample.response) == label.group(1).upper())


def find_choice(text: str) -> str | None:
    """The letter that the text chooses, in upper case; None without one, or with more than one."""
    answer = after_thinking(text)
    text = (text if answer is None else answer)[-2000:]
    if r"\boxed" in text or r"\fbox" in text:
        box = _ALONE.fullmatch(last_box(text) or "")
        return box and box.group(1).upper()
    announced = [match.end() for match in _ANNOUNCED.finditer(text)]
    if announced:
        letter = _FOLLOWED.match(text, announced[-1])
        if letter is None or not _is_letter(text, letter) or _SECOND.match(text, letter.end(1)):
            return None
        return letter.group(1).upper()
    lines = text.strip().splitlines()
    line = _ALONE.fullmatch(lines[-1].strip()) if lines else None
    return line and line.group(1).upper()


def _is_letter(text: str, letter: re.Match[str]) -> bool:
    """Whether it is no word of its own: a lower-case letter counts in brackets only."""
    before = text[letter.start(1) - 1]
    return letter.group(1).isupper() or before in "([{*"
