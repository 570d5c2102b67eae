r"""What a written answer is: a number, words, or a formula; and nothing where it has no sure reading.

Labels and answers are read by the same rules, and only by regular expressions:
- around it, $...$, \(...\), \[...\], a currency sign and a full stop are left out;
- a number may have its digits in groups (1,234  1{,}234  7\,500  7 500), be a fraction, a mixed number (3 1/4 is 13/4),
  a percentage, of the form 3 \times 10^5 or 1e-3, a repeating decimal 0.\overline{3}, or have a scale (2 million);
- behind a number or formula a unit is left out: \text{ cm}^2, ^\circ, or words (6 dollars, 60 miles per hour, 10cm);
  but two well-known ones must be the same: 10 cm is not 10 m;
- words are \text{...}, or letters alone: those are never a product, so that listen is not silent. A single letter, a
  time of day (12:30) and a number in another base (52_8) are compared as text too;
- what mixes words and mathematics (The answer is 6), or has numbers side by side (12 5), has no sure reading;
- the rest is a formula, in which letters are variables, xy is x times y, and "and" and "or" separate answers.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from miles.rewards.answers import last_box, plain_signs
from miles.utils.errors import UserError

# Digits of a decimal that count: a double has no more, and what prints doubles shows rounding errors behind them.
MOST_DIGITS = 15
# From so many digits on a decimal may stand for what rounds to it, such as 0.333333 for 1/3.
ROUNDED_DIGITS = 6
# Characters of an answer or label: parsing takes time with the square of the length.
LONGEST = 1000


class Number(NamedTuple):
    """A number as it is written.

    Attributes:
        value: exact, of a percentage that in front of the sign.
        places: digits behind the point of a decimal; None for one without a point, or a fraction.
        percent: whether a per cent sign follows.
        unit: what it is of, "" unless that is well known.
    """

    value: Fraction
    places: int | None = None
    percent: bool = False
    unit: str = ""

    def equals(self, other: "Number") -> bool:
        """Whether both have one value; a percentage is 50 as well as 0.5 where the other one is none."""
        if self.percent == other.percent:
            return same_value(self, other)
        percentage, plain = (self, other) if self.percent else (other, self)
        hundredth = percentage._replace(
            value=percentage.value / 100, places=None if percentage.places is None else percentage.places + 2
        )
        return same_value(percentage, plain) or same_value(hundredth, plain)


class Words(NamedTuple):
    """A text, without what does not count in it: case, white space, punctuation."""

    key: str


class Formula(NamedTuple):
    """LaTeX for math-verify, and its unit as with a number."""

    latex: str
    unit: str = ""


Reading = Number | Words | Formula


def same_value(a: Number, b: Number) -> bool:
    """Equal, or one is a decimal of at least 6 significant digits to which the other one rounds."""
    return a.value == b.value or rounds_to(a.value, b) or rounds_to(b.value, a)


def rounds_to(value: Fraction, decimal: Number) -> bool:
    """Whether `decimal` has enough digits to stand for what rounds to it, and `value` does."""
    if decimal.places is None:
        return False
    digits = decimal.value * 10**decimal.places
    return abs(digits) >= 10 ** (ROUNDED_DIGITS - 1) and abs(value * 10**decimal.places - digits) <= Fraction(1, 2)


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_TEN = r"\s*(?:\\times|\\cdot|\*)\s*10\^\s*(?:\{\s*(?P<braced>-?\d+)\s*\}|(?P<bare>-?\d+))|[eE](?P<e>[-+]?\d+)"
_FRACTION = r"\\frac\s*\{\s*(?P<top>-?\d+)\s*\}\s*\{\s*(?P<bottom>-?\d+)\s*\}"
_SLASH = rf"(?P<over>-?{_DIGITS})\s*/\s*(?P<under>{_DIGITS})"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?:(?P<whole>\d+)\s*)?{_FRACTION}|(?:(?P<mixed>\d+)\s+)?{_SLASH}"
    rf"|(?P<start>\d*\.\d*)(?:\\overline\s*\{{(?P<period>\d+)\}})|(?P<decimal>{_DECIMAL})(?:{_TEN})?)"
    r"(?P<percent>\s*\\?%)?",
    re.ASCII,
)
_LONGEST_EXPONENT = 4  # digits


def read_number(text: str) -> Number | None:
    r"""The number that all of the text is; None if it is not one. Signs are in ASCII, and fractions are \frac{}{}."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    sign = -1 if found["sign"] == "-" else 1
    percent = found["percent"] is not None
    if found["bottom"] or found["under"]:
        top, bottom = (_integer(found[a] or found[b]) for a, b in (("top", "over"), ("bottom", "under")))
        whole = found["whole"] or found["mixed"]
        if bottom == 0 or (whole and (top < 0 or bottom < 0)):
            return None
        return Number(sign * (int(whole or 0) + Fraction(top, bottom)), None, percent)
    if found["period"]:
        start, period = found["start"], found["period"]
        places = len(start.partition(".")[2])
        repeated = Fraction(int(period), (10 ** len(period) - 1) * 10**places)
        return Number(sign * (Fraction("0" + start + "0") + repeated), None, percent)
    digits = found["decimal"].replace(",", "")
    exponent = found["braced"] or found["bare"] or found["e"] or "0"
    if len(exponent.lstrip("+-")) > _LONGEST_EXPONENT:
        return None
    decimals: int | None = len(digits.partition(".")[2]) or None
    value = Fraction("0" + digits + "0" * digits.endswith("."))
    significant = len(digits.replace(".", "").lstrip("0"))
    if decimals is not None and significant > MOST_DIGITS:
        decimals -= significant - MOST_DIGITS
        value = Fraction(round(value * Fraction(10) ** decimals)) / Fraction(10) ** decimals
    power = int(exponent)
    if decimals is not None:
        decimals -= power
    return Number(sign * value * Fraction(10) ** power, decimals if decimals and decimals > 0 else None, percent)


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))


_SYMBOLS = str.maketrans(
    {
        **{
            "π": r"\pi ",
            "θ": r"\theta ",
            "∞": r"\infty ",
            "±": r"\pm ",
            "×": r"\times ",
            "⋅": r"\cdot ",
            "·": r"\cdot ",
        },
        **{"÷": r"/", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap "},
        **{"∈": r"\in ", "°": r"^\circ ", "∅": r"\emptyset ", "√": r"\sqrt", "\u00a0": " ", "\u2009": " "},
        **{raised: f"^{{{i}}}" for i, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"},
    }
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_FUNCTIONS = r"(?:arc)?(?:sin|cos|tan)h?|cot|csc|ln|log"
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|phi|omega|pi"
_REWRITES = [
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*(\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*(\{)"), r"\\frac{\1}\2"),
    (re.compile(r"\\(?:displaystyle|left(?![a-z])|right(?![a-z])|limits)\s*"), ""),
    (re.compile(r"\\(?:text|mbox|mathrm)\s*\{[\s,]*(?:and|or)\s*\}"), ", "),
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])"), " "),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<![a-zA-Z])\\?sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![a-zA-Z])\\?sqrt\s*(\d+)"), r"\\sqrt{\1}"),
    (re.compile(rf"(?<![a-zA-Z\\])({_FUNCTIONS}|{_GREEK}|infty)(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"(?<=\d)\s*[x*]\s*(?=10\s*\^)"), r" \\times "),
    (
        re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*(?:percent|per cent|pct)\s*\}|(?:percent|per cent|pct)(?![a-zA-Z]))"),
        r"\\%",
    ),
    (re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*({'|'.join(_SCALES)})\s*\}}|({'|'.join(_SCALES)})(?![a-zA-Z]))"), None),
    (re.compile(r"(?<![\d.,])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])"), r"\1\\frac{\2}{\3}"),
]


def in_latex(text: str) -> str:
    """The text with plain forms of mathematics in LaTeX: signs, roots, functions, fractions, scales."""
    text = plain_signs(text).translate(_SYMBOLS)
    for pattern, form in _REWRITES:
        text = pattern.sub(
            form if form is not None else (lambda scale: rf" \times 10^{{{_SCALES[scale[1] or scale[2]]}}}"), text
        )
    return text


_LETTER = r"[^\W\d_]"
_FONT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)"
_IN_FONT = re.compile(rf"{_FONT}\s*\{{([^{{}}]*)\}}")
_ALL_IN_FONT = re.compile(rf"(?:{_FONT}\s*\{{)+([^{{}}]*)\}}+")
_MARKS = [re.compile(p, re.DOTALL) for p in (r"\$\$(.*)\$\$", r"\$(.*)\$", r"\\\((.*)\\\)", r"\\\[(.*)\\\]")]
_CURRENCY = re.compile(r"(?<!\d)\s*(?:\\?\$|\\?[€£¥₹])\s*(?=[-.\d])|(?<=\d)\s*(?:\\?\$|[€£¥₹])$")
_TIME = re.compile(r"\d{1,2}:\d{2}(?:\s*[ap]\.?\s?m\.?)?|\d{4}-\d{2}-\d{2}", re.IGNORECASE)
_BASE = re.compile(r"(\d[\dA-F]*)_\{?(\d+)\}?")
_NAMED = re.compile(rf"(?:{_IN_FONT.pattern}|{_LETTER}{{3,}}(?:\s{_LETTER}+)*)\s*=(?!.*=)\s*")

_SHORT_UNITS = r"mm|cm|dm|km|ml|mL|mg|kg|gm|ft|in|yd|mi|lb|lbs|oz|hr|hrs|min|sec|mph|kmh|kWh|Hz"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
# A single letter is a unit behind a space only: 10 m, but 10m is ten times m.
_WORD_UNITS = (
    rf"(?:\s+(?:{_LETTER}{{3,}}|{_SHORT_UNITS})|\s*(?:{_SHORT_UNITS})){_POWER}(?:(?:\s+|\s*[/.-]\s*){_LETTER}+{_POWER})*"
    rf"|\s+[mgshL](?:/{_LETTER}+{_POWER})?"
)
_FONT_UNITS = rf"(?:\s*[/·]?\s*{_FONT}\s*\{{[^{{}}]*\}}{_POWER})+"
_DEGREES = rf"\s*\^\s*(?:\{{\s*\\circ\s*\}}|\\circ)\s*(?:{_FONT}\s*\{{\s*)?[CF]?\s*\}}?"
_UNIT = re.compile(rf"(?:(?<=[\d}})%])|(?<=\\pi))(?:{_DEGREES})?(?P<words>{_FONT_UNITS}|{_WORD_UNITS})?", re.ASCII)
_JOINS = {"and", "or"}
# Behind a number these say more than what it counts.
_NO_UNITS = {
    *_JOINS,
    *_SCALES,
    "dozen",
    "half",
    "squared",
    "cubed",
    "factorial",
    "base",
    "mod",
    "am",
    "pm",
    "to",
    "plus",
}

# Units that are taken for one another, and a hint of which one is meant: singular.
_KNOWN_UNITS = {
    alias: names.split()[0]
    for names in (
        *(
            "mm millimeter millimetre",
            "cm centimeter centimetre",
            "dm",
            "m meter metre",
            "km kilometer kilometre kmh kph",
        ),
        *("inch inche in", "foot feet ft", "yard yd", "mile mi mph", "mg milligram", "g gram gm", "kg kilogram"),
        *("pound lb", "ounce oz", "second sec s", "minute min", "hour hr h", "day", "week", "month", "year", "cent"),
        *("dollar", "ml milliliter millilitre", "liter litre l", "gallon gal", "degree", "radian rad"),
    )
    for alias in names.split()
}

_RUN = re.compile(rf"(?<!\\)(?<!\\{_LETTER})(?<!{_LETTER}){_LETTER}+")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_OPERATORS = set("+-*/=<>^_|!\\")
_SMALL_WORDS = set("is of to in at on by if no be we it he as am pm an do go so up us".split())
_SIDE_BY_SIDE = re.compile(r"(?<!_)(?<!_\w\^)\d\s+\d|(?<![\\a-zA-Z_])[a-zA-Z]\s+\d|\d\s*\.\s*\.", re.ASCII)


def read(text: str) -> Reading | None:
    """What the text is; None without a sure reading."""
    if len(text) > LONGEST:
        return None
    text = _unwrapped(in_latex(text))
    if not text or not _balanced(text):
        return None
    if number := read_number(text):
        return number
    if base := _BASE.fullmatch(text):
        return Words(f"{base[1]}_{base[2]}")
    if _TIME.fullmatch(text):
        return Words(word_key(text))
    if inner := _ALL_IN_FONT.fullmatch(text):
        return read_number(inner[1].strip()) or _words(inner[1])
    if named := _NAMED.match(text):
        return read(text[named.end() :])
    if _is_words(text):
        return _words(text)
    front, unit = _without_unit(text)
    if front is None:
        return None
    number = read_number(front)
    if number is not None:
        return number._replace(unit=unit)
    return Formula(front, unit) if _is_formula(front) else None


def read_label(label: str) -> Reading:
    """What a label is: of what its last box holds, if it has one, or of what follows "####", as in GSM8K.

    Raises:
        ValueError: it has no sure reading.
    """
    text = label.rpartition("####")[2]
    if r"\boxed" in text or r"\fbox" in text:
        text = last_box(text) or ""
    reading = read(text)
    if reading is None:
        formulas = re.findall(r"\$([^$]*\d[^$]*)\$\W*$", text) if text.count("$") == 2 else []
        reading = read(formulas[0]) if formulas else None
    if reading is None:
        raise UserError(
            f"the label {label!r} can't be read as mathematics for sure: give a number, a formula in LaTeX, one with a "
            r"unit such as 6 dollars, words without numbers, or \text{any text}"
        )
    return reading


def word_key(text: str) -> str:
    """What counts of words."""
    text = _ALL_IN_FONT.sub(r"\1", _IN_FONT.sub(r"\1", text)).casefold()
    text = re.sub(r"^\W*(?:the|an?)\s+(?=\w)", "", text)
    text = re.sub(rf"(?<={_LETTER})-(?={_LETTER})|(?<!\d)[.,]|[.,](?!\d)", "", text)
    return re.sub(r"[\s\"'’“”`!?;(){}\[\]$*~\\]", "", text)


def _words(text: str) -> Words | None:
    key = word_key(text)
    return Words(key) if key else None


def _unwrapped(text: str) -> str:
    before = None
    while text != before:
        before, text = text, text.strip().removesuffix(".").strip()
        for mark in _MARKS:
            inner = mark.fullmatch(text)
            if inner and mark.pattern[:2] not in inner[1].replace(r"\$", ""):
                text = inner[1]
        if (
            text.startswith((r"\boxed", r"\fbox"))
            and text.endswith("}")
            and text.count("boxed") + text.count("fbox") == 1
        ):
            text = last_box(text) or text
        text = text.removeprefix("**").removesuffix("**")
    text = _CURRENCY.sub("", text)
    return text.replace("$", "").strip() if text.count("$") % 2 == 0 else text


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def _is_words(text: str) -> bool:
    """Letters alone, with at least two side by side that are no function, or one letter."""
    plain = _IN_FONT.sub(r"\1", text)
    if not re.fullmatch(rf"\W*{_LETTER}(?:{_LETTER}|[\s.,;:!?'’\"-])*\W*", plain) or re.search(r"[\\^+*/=<>|]", plain):
        return False
    runs = re.findall(rf"{_LETTER}+", plain)
    return len(plain.strip("()[]. ")) == 1 or any(len(run) > 1 and run not in _JOINS for run in runs)


def _without_unit(text: str) -> tuple[str | None, str]:
    """The text in front of its unit, all of it without one, and the unit if it is well known.

    The text is None where what follows a number is no unit.
    """
    for unit in _UNIT.finditer(text):
        if unit.end() != len(text) or unit.start() == unit.end():
            continue
        words = re.findall(rf"{_LETTER}+", _COMMAND.sub("", unit["words"] or "").lower())
        if words and words[0] in _JOINS:
            continue
        known = [
            _KNOWN_UNITS[name] for name in (word.removesuffix("s") or "s" for word in words) if name in _KNOWN_UNITS
        ]
        return None if _NO_UNITS & set(words) else text[: unit.start()].strip(), known[0] if known else ""
    return text, ""


def _is_formula(text: str) -> bool:
    """Whether letters are variables or functions, and numbers don't stand side by side."""
    bare = _IN_FONT.sub(lambda font: " " * len(font[0]), text)
    if _SIDE_BY_SIDE.search(bare) or not re.search(r"\w|\\infty|\\emptyset|\\varnothing", text):
        return False
    for run in _RUN.finditer(bare):
        before, behind = bare[: run.start()].rstrip()[-1:], bare[run.end() :].lstrip()[:1]
        touching = bare[max(0, run.start() - 1) : run.start()] + bare[run.end() : run.end() + 1]
        # A hyphen may join words: 5-year-old.
        operand = {before, behind} - {""} & _OPERATORS - set("-" * ("-" in touching)) or re.search(r"[\d{}]", touching)
        word = run[0].lower() in _SMALL_WORDS or len(run[0]) > 2
        if word and run[0] not in _JOINS and not operand:
            return False
    return True
