"""Where in a response its answer stands, and its signs in one form; in time linear in the length of the text."""

import re

from miles.utils.errors import UserError

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_END_OF_THINKING = "</think>"

# Full-width forms, U+FF01 to U+FF5E, and everything that is a minus or hyphen wherever it stands.
_ASCII = {0xFF01 + i: 0x21 + i for i in range(94)} | dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2212\ufe63"), "-")
# An en dash is a minus as a sign, and between operands with spaces around it; 5\u20137 is a range.
_EN_MINUS = re.compile(r"(?<![\w)\]}])\u2013(?=[\d.\\($])|(?<=[\d)\]}] )\u2013(?= [\d.\\($])")
_SPACE = r"(?:\{\s*,\s*\}|,?\s*\\!\s*,?\s*|,?\\,|\\[;: ]|~|[ \u00a0\u2009\u202f])"
_GROUPED = re.compile(rf"(?<![\d.,^_])(?<!\d\s)(\d{{1,3}})((?:{_SPACE}\d{{3}})+)(?!{_SPACE}?\d)", re.ASCII)


def plain_signs(text: str) -> str:
    r"""The text with full-width signs and other minus signs in ASCII, and without what groups digits by three.

    Grouped are digits by {,} \, \! ~ or a space: 7 500 is 7500. A plain comma stays, as it may separate numbers.
    """
    text = _EN_MINUS.sub("-", text.translate(_ASCII))
    return _GROUPED.sub(lambda number: number[1] + re.sub(r"\D", "", number[2]), text)


def last_box(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds; None without one, or where its brace is never closed.

    Braces inside may nest and may be escaped: \boxed{\{1, 2\}} holds \{1, 2\}.
    """
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    box = _BOX.match(text, start) if start >= 0 else None
    if box is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[box.end() : brace.start()].strip()
    return None


def unboxed(label: str) -> str:
    r"""What the last box of a label holds, or all of a label without one.

    Raises:
        ValueError: its brace is never closed.
    """
    if r"\boxed" not in label and r"\fbox" not in label:
        return label
    box = last_box(label)
    if box is None:
        raise UserError(f"the label {label!r} has a box without its closing brace")
    return box


def after_thinking(text: str) -> str | None:
    """What follows the last </think>; None without one."""
    _, mark, answer = text.rpartition(_END_OF_THINKING)
    return answer if mark else None
