r"""`--rm-type dapo`: the rule of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 7), 1 or -1.

The prompt asks for a last line "Answer: ...". What follows the last "Answer:" of the response's last 300 characters, up
to the end of its line, is its answer; both it and the label are normalised as text and compared character for
character. No value is computed: 1/2 is not 0.5.

Normalisation follows the final answers of Minerva (Lewkowycz et al. 2022, https://arxiv.org/abs/2206.14858, appendix
D.1): of an equation what is behind its last "="; of mixed text the formula between $; then without an article at its
start, units behind a number, \text{}, \boxed{} and white space, but for that between digits, with \frac and \sqrt in
their long form, minus signs as "-", and numbers without what groups their digits.
"""

import re
from typing import TYPE_CHECKING

from miles.rewards.answers import last_box, plain_signs
from miles.rewards.reward import Reward, label_of
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

TAIL = 300  # characters

_COLON = {0xFF1A: ":"}
_ANSWER = re.compile(r"answer\s*:", re.IGNORECASE)
# A displayed formula, which may have lines of its own, or the line.
_DISPLAYED = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|([^\n]*)", re.DOTALL)
_EQUALS = re.compile(r"(?<![<>!:\\])=")
_FORMULA = re.compile(r"\$([^$]+)\$")
_ARTICLE = re.compile(r"^\s*an?\s+(?=[a-zA-Z]{2})", re.IGNORECASE)
_UNITS = re.compile(
    r"(?:(?<=[\d})])|(?<=\d[a-z]))(?:\s*(?:square|ways?|integers?|dollars?|cents?|mph|inch|inches|in|ft|foot|feet|yards?"
    r"|miles?|mm|cm|km|meters?|gm|kg|grams?|pounds?|seconds?|minutes?|hours?|days?|degrees?|units?|points?|digits?"
    r"|percent|students?)\b)+|(?<=[\d})])\s+[mg](?=[\s.]*$)"
)
_SIGNS = re.compile(r"\\(?:ldots|dots)|\^?\s*\{?\s*\\(?:circ|degree)\b\s*\}?|\\?%|°")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\w)")
_SPACE = re.compile(r"\\[,;:! ]|[\s~]")
_DROPPED = re.compile(r"\\left|\\right|\\\$|[$*]")
# Between digits white space stays: 3 1/4 is not 31/4.
_SPACES = re.compile(r"(?<!\d) +| +(?!\d)")
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


async def dapo_reward(config: "RunConfig", sample: "Sample") -> dict[str, float | str]:
    """score: 1.0 for the right answer, else -1.0; acc: 1.0 or 0.0; pred: the answer as compared, "" without one.

    Raises:
        ValueError: nothing is left of the label once it is normalised.
    """
    label = read_label(label_of(sample))
    answer = normalize(find_answer(sample.response))
    right = answer == label
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}


def read_label(label: str) -> str:
    """The label in the form that is compared.

    Raises:
        ValueError: nothing is left of it.
    """
    normalized = normalize(label)
    if not normalized:
        raise UserError(f"nothing is left of the label {label!r} once it is normalised")
    return normalized


def find_answer(response: str) -> str:
    """What follows the last "Answer:", in its line or, where that is empty, the next; "" without one."""
    _, *tails = _ANSWER.split(response[-TAIL:].translate(_COLON))
    if not tails:
        return ""
    formula = _DISPLAYED.match(tails[-1].lstrip(" \t\r\n*"))
    assert formula is not None, "its last alternative matches any text"
    return formula[1] or formula[2] or formula[3]


def normalize(answer: str) -> str:
    """The text in the one form that is compared."""
    box = last_box(answer)
    answer = _EQUALS.split(plain_signs(answer if box is None else box))[-1]
    formulas = _FORMULA.findall(answer)
    answer = _TEXT.sub(r"\1", formulas[-1] if formulas else answer)
    answer = _UNITS.sub("", _ARTICLE.sub("", _SIGNS.sub("", answer)))
    answer = _SHORT_FRACTION.sub(lambda f: rf"\frac{{{f[1] or f[2] or ''}}}{{{f[3] or f[4] or ''}}}", answer)
    answer = _DROPPED.sub("", _SHORT_ROOT.sub(r"\\sqrt{\1}", answer))
    answer = _SPACES.sub("", _SPACE.sub(" ", answer).strip()).rstrip(".")
    return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer


DAPO = Reward(
    name="dapo",
    help="1 or -1 for what follows Answer:",
    judge=dapo_reward,
    read_label=read_label,
    numbers={"score": "1 or -1", "acc": "1 or 0"},
)
