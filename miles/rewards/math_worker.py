"""The process that judges mathematical answers: a JSON request a line in, a JSON result a line out.

Text of the model is only ever parsed as LaTeX by latex2sympy's grammar. math-verify's extraction of plain expressions
is not used: it ends in sympy's `parse_expr`, which is Python's `eval`. So plain numbers and arithmetic are found here
and handed on as LaTeX. (For a number the grammar found, sympy does evaluate that one literal, as in `Integer(5)`.)

The answer is the first that can be read of
1. the last \\boxed or \\fbox, if there is one: then nothing else counts;
2. what follows the last word "answer": a LaTeX formula in it, else the first plain number that no "=" follows;
3. the last line from its last "=" on, if no word is in it and it is short: 85, or x^2+1;
4. the whole text: its last LaTeX formula, else the last plain number.
Of a box the first 1,000 characters are read; without a box, the last 2,000 of the text. Short is up to 200.
LaTeX formulas stand in $...$, \\(...\\) or \\[...\\]. A plain number may be arithmetic too, such as 3*(4+5), but has no
letters.
"""

import functools
import json
import os
import re
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

from miles.utils.errors import UserError

MEMORY_LIMIT_BYTES = 4 << 30
# Characters. Parsing takes time with the square of the length; a model that rambles must not run into the time limit.
LONGEST_BOX = 1000
LONGEST_TAIL = 2000
LONGEST_LINE = 200

_NUMBER = r"(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
_PLAIN = re.compile(
    rf"(?<![\w.^])-?\s?\(*-?{_NUMBER}\)*(?:\s*[-+*/^×÷]\s*\(*-?{_NUMBER}\)*)*(?![\w^]|\.\d)(?:\s*\\?%)?", re.ASCII
)
_EXPONENT = re.compile(rf"(?<![\w.])({_NUMBER})[eE]([-+]?\d+)\b", re.ASCII)
_BOLD = re.compile(r"(?<![\w)])\*\*([^*\n]+)\*\*")
_WORD_OR_FORMULA = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2}|\$|\\[()\[\]]")
_LATEX = [LatexExtractionConfig()]


def find_answer(text: str) -> list:
    """What the text gives as its answer, as sympy objects; empty if nothing can be read."""
    text = _BOLD.sub(r"\1", text.replace(r"\fbox", r"\boxed"))
    if r"\boxed" in text:
        return _read_latex(text[text.rindex(r"\boxed") :][:LONGEST_BOX])
    text = text[-LONGEST_TAIL:]
    anchor = text.lower().rfind("answer")
    if anchor >= 0:
        tail = text[anchor + len("answer") :]
        found = [match for match in _PLAIN.finditer(tail) if not tail[match.end() :].lstrip().startswith("=")]
        answer = _read_latex(tail) or (_read_formula(found[0].group()) if found else [])
        if answer:
            return answer
    last_side = re.split("[=\n]", text.rstrip())[-1]
    if len(last_side) <= LONGEST_LINE and not _WORD_OR_FORMULA.search(last_side):
        answer = _read_formula(last_side)
        if answer:
            return answer
    found = _PLAIN.findall(text)
    return _read_latex(text) or (_read_formula(found[-1]) if found else [])


def _read_formula(formula: str) -> list:
    return _read_latex(rf"\boxed{{{formula.strip().rstrip('.')}}}")


def _read_latex(text: str) -> list:
    text = _EXPONENT.sub(r"\1 \\times 10^{\2}", text)
    return parse(text, _LATEX, fallback_mode="no_fallback", parsing_timeout=None)


@functools.lru_cache(maxsize=1024)
def read_label(label: str) -> list:
    """The label as sympy objects; it may be bare, such as 1/2, or hold a \\boxed or $...$ of its own.

    Raises: ValueError if it can't be read as mathematics, or has no value that equals itself, as 0/0 has none.
    """
    bare = not any(mark in label for mark in (r"\boxed", "$", r"\(", r"\["))
    gold = _read_formula(label) if bare else _read_latex(label)
    if not gold or not verify(gold, gold, timeout_seconds=None):
        raise UserError(f"the label {label!r} can't be read as mathematics")
    return gold


def judge(label: str, response: str) -> float:
    """1.0 if the response's answer has the label's value, else 0.0, also where the two can't be compared.

    Raises: ValueError for an unusable label.
    """
    return float(verify(read_label(label), find_answer(response), timeout_seconds=None))


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
            result = {"reward": judge(request["label"], request["response"])}
        except Exception as error:  # whatever math-verify raises goes back to be counted as this sample's error
            result = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        results.write(json.dumps(result) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
