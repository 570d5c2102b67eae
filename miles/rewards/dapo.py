r"""`--rm-type dapo`: the rule of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 7), 1 or -1.

The prompt asks for a last line "Answer: ...". What follows the last "Answer:" of the response's last 300 characters, up
to the end of its line, is its answer; both it and the label are normalised as text and compared character for
character. No value is computed: 1/2 is not 0.5.

Normalisation follows the final answers of Minerva (Lewkowycz et al. 2022, https://arxiv.org/abs/2206.14858, appendix
D.1): of an equation what is behind its last "="; of mixed text the formula between $; then without articles, units,
\text{}, \boxed{} and white space, with \frac and \sqrt in their long form and whole numbers without commas.
"""

import re

from miles.config import RunConfig
from miles.rewards.answers import last_box
from miles.utils.errors import UserError
from miles.utils.types import Sample

TAIL = 300  # characters

_ANSWER = re.compile(r"answer\s*:[ \t]*([^\n]*)", re.IGNORECASE)
_FORMULA = re.compile(r"\$([^$]+)\$")
_WORDS = re.compile(
    r"\b(?:an?|square|squared|ways?|integers?|dollars?|cents?|mph|inch|inches|in|ft|foot|feet|yards?|miles?|mm|cm|m|km"
    r"|meters?|g|gm|kg|grams?|pounds?|seconds?|minutes?|hours?|days?|degrees?|units?|points?|digits?|percent|students?)\b"
    r"|\\(?:ldots|dots|circ|degree)|\\?%|°"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\w)")
_DROPPED = re.compile(r"\\left|\\right|\\[,;:! ]|\\\$|[\s$*]")
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


async def dapo_reward(config: RunConfig, sample: Sample) -> dict[str, float | str]:
    """score: 1.0 for the right answer, else -1.0; acc: 1.0 or 0.0; pred: the answer as compared, "" without one.

    Raises: ValueError for a label that is nothing once normalised.
    """
    label = normalize(sample.label)
    if not label:
        raise UserError(f"nothing is left of the label {sample.label!r} once it is normalised")
    answers = _ANSWER.findall(sample.response[-TAIL:])
    answer = normalize(answers[-1]) if answers else ""
    right = answer == label
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}


def normalize(answer: str) -> str:
    """The text in the one form that is compared."""
    box = last_box(answer)
    answer = (answer if box is None else box).split("=")[-1]
    formulas = _FORMULA.findall(answer)
    answer = formulas[-1] if formulas else answer
    answer = _WORDS.sub("", _TEXT.sub(r"\1", answer))
    answer = _SHORT_FRACTION.sub(lambda f: rf"\frac{{{f[1] or f[2] or ''}}}{{{f[3] or f[4] or ''}}}", answer)
    answer = _DROPPED.sub("", _SHORT_ROOT.sub(r"\\sqrt{\1}", answer)).rstrip(".")
    return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer
