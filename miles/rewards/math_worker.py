r"""The process that judges mathematical answers: a JSON request a line in, a JSON result a line out.

Text of the model is only ever parsed as LaTeX by latex2sympy's grammar. math-verify's extraction of plain expressions
is not used: it ends in sympy's `parse_expr`, which is Python's `eval`. So plain numbers and arithmetic are found here
and handed on as LaTeX. (For a number the grammar found, sympy does evaluate that one literal, as in `Integer(5)`.)

The answer is the first that there is of
1. what the last \boxed or \fbox holds: then nothing else counts, also if its brace is never closed;
2. behind the last word "answer": what follows at once ("answer is", "answer:"), or else the last LaTeX formula, or else
   the first plain number that no "=" follows;
3. the last line from its last "=" on, if no word is in it and it is short: 85, or x^2+1;
4. the whole text: its last LaTeX formula, else the last plain number.
What it is, `miles.rewards.math_text` says; without a sure reading it is no answer, and the next one is not looked for.
Of a text without a box the last 2,000 characters are read; short is up to 200. LaTeX formulas stand in $...$, \(...\)
or \[...\]; several with "and", "or" or a comma between them are one answer. A plain number may be arithmetic too, such
as 3*(4+5), with roots and pi, but has no letters, and is none where it is a part of something larger, such as 5 + x.

Where the label is words, they must be what the box holds, what follows the last "answer is" or "answer:" in its
sentence, or the last line.
"""

import functools
import json
import os
import re
import resource
import signal
import sys
from fractions import Fraction

import sympy
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse, verify

from miles.rewards import math_text
from miles.rewards.answers import last_box, plain_signs
from miles.rewards.math_text import Formula, Number, Reading, Words, in_latex, read, word_key
from miles.utils.errors import UserError

MEMORY_LIMIT_BYTES = 4 << 30
# Characters: a model that rambles must not run into the time limit.
LONGEST_TAIL = 2000
LONGEST_LINE = 200

_NUMBER = r"(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
_ROOT = r"\\(?:sqrt\s*(?:\[\d\])?\{[^{}]*\}|frac\{[^{}]*\}\{[^{}]*\}|pi(?![a-zA-Z]))"
_FACTOR = rf"(?:{_NUMBER}(?:\s*{_ROOT})*|{_ROOT}(?:\s*{_ROOT})*)(?:\^\{{-?\d+\}})?"
_PLAIN = re.compile(
    rf"(?<![\w.^\\])-?\s?\(*-?{_FACTOR}\)*(?:\s*(?:[-+*/^]|\\times|\\cdot)\s*\(*-?{_FACTOR}\)*)*"
    r"(?!\w|\^(?!\s*\{?\s*\\circ)|\.\d)(?:\s*\\?%)?",
    re.ASCII,
)
# What makes a plain number a part of something larger: an operand or sign before it, or behind it.
_OPERAND_BEFORE = re.compile(
    r"(?:(?:(?<![a-zA-Z\\])[a-zA-Z]|[)\]}])\s*(?:[-+*/]|\\times|\\cdot)\s*|[<>!]=?\s*|\d:|\\[a-zA-Z]+\s*)$"
)
_VARIABLE_BEFORE = re.compile(r"(?:(?<![a-zA-Z\\])[a-zA-Z]|[)\]}])\s*$")
_OPERAND_BEHIND = re.compile(
    r"\s*(?:\\(?![%)\]$\\]|text|mathrm|mbox|l?dots)|[+*/]\s*[\w\\(]|\s*[<>]|-\s*(?:[a-zA-Z](?![a-zA-Z])|[\\(])|:\d)"
    r"|\s+(?:dozen|squared|cubed|factorial)\b"
)
_EXPONENT = re.compile(rf"(?<![\w.])({_NUMBER})[eE]([-+]?\d+)\b", re.ASCII)
_BOLD = re.compile(r"(?<![\w)])\*\*([^*\n]+)\*\*")
_MARKED = re.compile(
    r"\$\$([^$]+)\$\$|(?<![\\\d])\$([^$\n]+)\$(?!\d)|\\\(((?:[^\\]|\\(?!\)))+)\\\)|\\\[((?:[^\\]|\\(?!\]))+)\\\]"
)
_JOINED = re.compile(r"\s*(?:,|,?\s*(?:and|or))\s*")
_IS = re.compile(r"[\s:=*~]*(?:(?:is|are|was)\b)?[\s:=*~]*")
_WORD_OR_FORMULA = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2}|\$|\\[()\[\]]")
_EQUALS = re.compile(r"(?<![<>!:\\])=")
_RELATION = re.compile(r"[,;<>]|\\(?:le|ge|lt|gt|ne|in|pm|approx|cup|cap)")
_SENTENCE_END = re.compile(r"\n|[.!?](?:\s|$)|[,;]\s|\s(?:because|since|as|so)\s")
_LATEX = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        )
    )
]


def find_answer(text: str) -> Reading | None:
    """What the text gives as its answer; None without one, or without a sure reading of it."""
    candidate = _candidate(text)
    return None if candidate is None else read(candidate)


def find_words(text: str) -> Words | None:
    """What the text gives as its answer where it must be words."""
    text = _BOLD.sub(r"\1", text)
    if r"\boxed" in text or r"\fbox" in text:
        words = last_box(text)
    else:
        text = plain_signs(text[-LONGEST_TAIL:].strip())
        anchor = text.lower().rfind("answer")
        tail = text[anchor + len("answer") :] if anchor >= 0 else ""
        start = _end_of_is(tail)
        if 0 < start < len(tail):
            marked = _MARKED.match(tail, start)
            words = marked[0] if marked else _SENTENCE_END.split(tail[start:], maxsplit=1)[0]
        else:
            words = text.rpartition("\n")[2]
    if words is None or len(words) > math_text.LONGEST:
        return None
    reading = read(words)
    return reading if isinstance(reading, Words) else Words(word_key(plain_signs(words)))


def _end_of_is(text: str) -> int:
    """Where the "is" ends that the text begins with; 0 without one."""
    found = _IS.match(text)
    return found.end() if found else 0


def _candidate(text: str) -> str | None:
    """The text of the answer; None without one, "" where it is a part of something larger."""
    text = _BOLD.sub(r"\1", text)
    if r"\boxed" in text or r"\fbox" in text:
        return last_box(text)
    text = in_latex(text[-LONGEST_TAIL:])
    anchor = text.lower().rfind("answer")
    if anchor >= 0:
        tail = text[anchor + len("answer") :]
        start = _end_of_is(tail)
        formulas = _formulas(tail)
        if formulas and tail.startswith(("$", r"\(", r"\["), start):
            return formulas[0]
        numbers = [match for match in _PLAIN.finditer(tail) if not tail[match.end() :].lstrip().startswith("=")]
        if formulas and not (numbers and _PLAIN.match(tail, start)):
            return formulas[-1]
        if numbers:
            return _whole(tail, numbers[0])
    last_side = _EQUALS.split(text.rstrip().rpartition("\n")[2].lstrip(" \t#>*•→"))[-1]
    if len(last_side) <= LONGEST_LINE and not _WORD_OR_FORMULA.search(last_side) and re.search(r"\w", last_side):
        return last_side
    if formulas := _formulas(text):
        return formulas[-1]
    numbers = list(_PLAIN.finditer(text))
    return _whole(text, numbers[-1]) if numbers else None


def _formulas(text: str) -> list[str]:
    """The marked formulas, those that are joined as one, with a per cent sign behind them."""
    formulas, end = [], None
    for marked in _MARKED.finditer(text):
        inner = next(filter(None, marked.groups()))
        percent = re.match(r"\s*\\?%", text[marked.end() :])
        inner += r"\%" if percent else ""
        if end is not None and _JOINED.fullmatch(text, end, marked.start()):
            formulas[-1] += ", " + inner
        else:
            formulas.append(inner)
        end = marked.end() + (percent.end() if percent else 0)
    return formulas


def _whole(text: str, number: re.Match[str]) -> str:
    """The number, "" if it is a part of something larger."""
    before = text[max(0, number.start() - 20) : number.start()]
    if _OPERAND_BEFORE.search(before) or _OPERAND_BEHIND.match(text, number.end()):
        return ""
    if number[0].startswith("-"):
        # A dash with a space behind it is a sign only where nothing stands before it that it could divide.
        dash = number[0].startswith("- ") and before.rstrip()[-1:] not in ("=", "(", ":", ",")
        if dash or _VARIABLE_BEFORE.search(before):
            return ""
    return number[0]


@functools.lru_cache(maxsize=1024)
def parsed(reading: Number | Formula) -> list:
    """As sympy objects, decimals as exact fractions; empty if the grammar can't read it. A percentage has two."""
    if isinstance(reading, Number):
        value = sympy.Rational(reading.value.numerator, reading.value.denominator)
        return [value, value / 100] if reading.percent else [value]
    latex = _EXPONENT.sub(r"\1 \\times 10^{\2}", reading.latex)
    found = parse(rf"\boxed{{{latex}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None)
    return [exact(expression) for expression in found]


def exact(expression: sympy.Basic) -> sympy.Basic:
    """The expression with fractions for its decimals."""
    if isinstance(expression, sympy.Float):
        return sympy.Rational(str(expression))
    # Of a relation between sets latex2sympy may make True or False.
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase) or not expression.has(sympy.Float):
        return expression
    if isinstance(expression, sympy.MatrixBase):
        return expression.applyfunc(exact)
    # These two keep the order in which they were written.
    ordered = isinstance(expression, FiniteSet | And)
    parts = [exact(part) for part in (expression._unsorted_args if ordered else expression.args)]
    unevaluated = {"evaluate": False} if isinstance(expression, sympy.core.relational.Relational) else {}
    return expression.func(*parts, **unevaluated)


def read_label(label: str) -> Reading:
    """The label, which must be equal to itself, as 0/0 is not.

    Raises:
        ValueError: it has no sure reading, or can't be parsed.
    """
    reading = math_text.read_label(label)
    if isinstance(reading, Formula) and not _equal(reading, reading):
        raise UserError(f"the label {label!r} can't be read as mathematics")
    return reading


@functools.lru_cache(maxsize=1024)
def _equal(gold: Number | Formula, answer: Number | Formula) -> bool:
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if isinstance(gold, Number) and isinstance(answer, Number):
        return gold.equals(answer)
    values = parsed(answer)
    for number, formula in ((gold, values), (answer, parsed(gold))):
        if isinstance(number, Number) and number.places is not None and any(_rounds(one, number) for one in formula):
            return True
    return verify(parsed(gold), values, timeout_seconds=None)


def _rounds(expression: sympy.Basic, decimal: Number) -> bool:
    """Whether the expression is a number that the decimal stands for."""
    if not isinstance(expression, sympy.Expr) or not expression.is_number:
        return False
    value = expression.evalf(30)
    return bool(value.is_Float or value.is_Rational) and math_text.rounds_to(Fraction(str(value)), decimal)


def judge(label: str, response: str) -> float:
    """1.0 if the response's answer is the label, else 0.0, also where the two can't be compared.

    Raises:
        ValueError: the label can't be used.
    """
    gold = read_label(label)
    if isinstance(gold, Words):
        return float(find_words(response) == gold)
    answer = find_answer(response)
    if isinstance(answer, Formula) and isinstance(gold, Number) and not _RELATION.search(answer.latex):
        # Of an equation the last side, as a number if it is one.
        answer = read(_EQUALS.split(answer.latex)[-1]) or answer
    return float(answer is not None and not isinstance(answer, Words) and _equal(gold, answer))


def main() -> None:
    """Serve until the input closes. SIGPROF, left at its default, ends the process when one request takes too long."""
    time_limit_s = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints does not get between the results
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, time_limit_s)
        try:
            result: dict[str, float | str] = {"reward": judge(request["label"], request["response"])}
        except Exception as error:  # whatever math-verify raises goes back to be counted as this sample's error
            result = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        results.write(json.dumps(result) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
