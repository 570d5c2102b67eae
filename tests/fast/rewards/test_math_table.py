"""What an answer is worth against a label, row by row: right, wrong, or an error because the label can't be read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rewards import math_text
from miles.rewards.math_worker import judge

UNSURE = "unsure"
WRITTEN = [  # label, what a box holds, verdict
    # mixed numbers
    ("3 1/4", "13/4", 1),
    ("3 1/4", "3.25", 1),
    ("3 1/4", r"3\frac{1}{4}", 1),
    ("3 1/4", "3/4", 0),
    ("3 1/4", "1", 0),
    ("3 1/4", "31/4", 0),
    (r"-3\frac14", "-3.25", 1),
    (r"-3\frac14", "-2.75", 0),
    ("13/4", "3 1/4", 1),
    ("2 1/2 hours", "2.5", 1),
    ("2 1/2 hours", "1.5", 0),
    ("(3 1/4, 2)", "(3.25, 2)", 1),
    # grouped digits
    ("7 500", "7500", 1),
    ("7 500", "7,500", 1),
    ("7 500", "507", 0),
    (r"7\,500", "7500", 1),
    (r"7\,500", "507", 0),
    (r"7\!500", "7500", 1),
    ("1{,}234", "1234", 1),
    (r"1,\! 008,\! 016", "1008016", 1),
    ("1008016", r"1{,}008{,}016", 1),
    ("12 345 678", "12345678", 1),
    ("1,234,567.5", "1234567.5", 1),
    ("1 234 5", "12345", UNSURE),
    ("12 5", "125", UNSURE),
    ("12 5", "17", UNSURE),
    # units
    ("6 dollars", "6", 1),
    ("6 dollars", r"\$6", 1),
    ("6 dollars", "8", 0),
    ("$18.90", "18.9", 1),
    (r"\$36", "36", 1),
    ("6 apples", r"6\text{ apples}", 1),
    ("60 miles per hour", "60", 1),
    (r"10\text{ cm}^2", "10 cm^2", 1),
    ("10cm", "10", 1),
    (r"\frac{9}{4}\text{ m}", "2.25", 1),
    ("10 m", "10", 1),
    ("10", "10m", 0),
    ("10 cm", "10 m", 0),
    (r"10\text{ cm}^2", r"10\text{ m}^2", 0),
    ("10 inches", r"10\text{ in}", 1),
    ("6 dollars", "6 cents", 0),
    ("6 apples", "6 pears", 1),
    ("60 mph", "60 miles per hour", 1),
    (r"2\pi\text{ cm}", r"2\pi\text{ m}", 0),
    ("30 degrees", "30 radians", 0),
    ("30 min", "30 minutes", 1),
    ("2ab", "2", 0),
    ("2", "2ab", 0),
    ("2s", "2", 0),
    (r"2\pi cm", r"2\pi", 1),
    (r"90^\circ", "90", 1),
    ("90 degrees", "90°", 1),
    (r"-5^\circ\text{C}", "-5", 1),
    ("2 million", "2000000", 1),
    ("2 million dollars", "2", 0),
    ("2 million dollars", "2,000,000", 1),
    ("6", "6 million", 0),
    ("6 dozen", "72", UNSURE),
    ("5 squared", "5", UNSURE),
    # sentences and words
    ("The answer is 6", "6", UNSURE),
    ("x is 5", "5", UNSURE),
    ("5 apples and 3 pears", "8", UNSURE),
    ("1 hour 30 minutes", "30", UNSURE),
    ("June 20", "20", UNSURE),
    ("5-year-old", "5", UNSURE),
    ("The answer is $6$.", "6", 1),
    ("#### 72", "72", 1),
    ("48/2 = <<48/2=24>>24 clips\n48+24 = 72\n#### 72", "72", 1),
    ("listen", "silent", 0),
    ("listen", "Listen", 1),
    ("listen", r"\text{listen}", 1),
    ("no", "on", 0),
    ("ab", "ba", 0),
    (r"\text{east}", "east", 1),
    (r"\text{east}", "seat", 0),
    ("no solution", r"\text{No solution.}", 1),
    (r"\text{the ellipse}", "an ellipse", 1),
    (r"\text{June 20}", "June 20", 1),
    (r"\text{8:00 a.m.}", "8:00 AM", 1),
    (r"\text{8:00 a.m.}", "8:00 PM", 0),
    ("A", r"\text{(A)}", 1),
    ("A", r"\textbf{(B)}", 0),
    (r"\text{13}", "13", 1),
    ("x", "y", 0),
    ("6", "six", 0),
    # times, dates, ratios, other bases
    ("12:30", "12:30", 1),
    ("12:30", "0.4", 0),
    ("12:30 PM", "12:30 p.m.", 1),
    ("2023-05-01", "2017", 0),
    ("3:2", "6:4", 1),
    ("52_8", "52_{8}", 1),
    ("52_8", "52", 0),
    # intervals, sets, tuples, equations
    ("(1, 2]", r"\left(1, 2\right]", 1),
    ("(1, 2]", "[1, 2]", 0),
    ("(1, 2]", "(1, 2)", 0),
    ("(1, 2]", "(1, 3]", 0),
    (r"[1, \infty)", "[1, ∞)", 1),
    (r"(-\infty, 3) \cup (5, \infty)", "(-∞, 3) ∪ (5, ∞)", 1),
    (r"x \in (-2, 1]", "(-2, 1]", 1),
    (r"\{1, 2\}", "2, 1", 1),
    ("1, 2, 3", "1, 2", 0),
    ("2 or 3", r"2 \text{ or } 3", 1),
    (r"5\text{ or }7", "7, 5", 1),
    ("2 or 3", "2", 0),
    ("x = 3", "3", 1),
    ("x = 3", "x = 3", 1),
    ("x = 3", "y = 3", 0),
    ("3", "x = 3", 1),
    ("Area = 5", "5", 1),
    ("x = 0.5", r"\frac12", 1),
    ("y = 2x + 3", "y = 3 + 2x", 1),
    ("x > 3", "x < 3", 0),
    ("x > 3", "3", 0),
    (r"x \ge 5", "5", 0),
    ("5", r"x \geq 5", 0),
    (r"\pm 3", "3, -3", 1),
    (r"3 \pm 2\sqrt{2}", r"3 + 2\sqrt{2}, 3 - 2\sqrt{2}", 1),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", 1),
    (r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}", r"\begin{pmatrix} \frac12 \\ 3 \end{pmatrix}", 1),
    ("6 - 5i", "-5i + 6", 1),
    (r"\frac{a}{b}", r"\frac{b}{a}", 0),
    ("1", r"\{1\} \subset \{1, 2\}", 0),
    ("0.5", r"\{0.5\} \cup [1, 2.5]", 0),
    (r"\{0.5\} \cup [1, 2.5]", r"\{\frac12\} \cup [1, \frac52]", 1),
    ("0.5x + 1 = y", r"y = \frac{x}{2} + 1", 1),
    ("0.5 < x < 2", r"\frac12 < x < 2", 1),
    (r"\int_0^1 0.5 dx", "0.5", 1),
    (r"\begin{cases} 0.5 & x > 0 \\ 1 & x \le 0 \end{cases}", "0.5", UNSURE),
    # percentages and decimals
    ("50%", r"50\%", 1),
    ("50%", "0.5", 1),
    ("50%", "0.5%", 0),
    ("50 percent", "50", 1),
    ("33.3333%", "1/3", 1),
    ("0.00000003", "0.00000004", 0),
    ("0.00000003", r"3 \times 10^{-8}", 1),
    ("0.00000003", "0", 0),
    (r"1.5 \times 10^{-20}", r"2.5 \times 10^{-20}", 0),
    ("[0.00000003, 1]", "[0.00000004, 1]", 0),
    ("[0.5, 1]", r"[\frac12, 1]", 1),
    ("0.1", "0.1000001", 0),
    ("1234567.1", "1234567.2", 0),
    ("1/3", "0.333333", 1),
    ("1/3", "0.33333", 0),
    ("1/30000000", "0.00000003", 0),
    (r"\sqrt{2}", "1.41421356", 1),
    (r"\sqrt{2}", "1.41", 0),
    (r"\frac{\pi}{2}", "1.570796", 1),
    ("0.30000000000000004", "0.3", 1),
    (r"0.\overline{3}", "1/3", 1),
    (r"5.\overline{45}", r"\frac{60}{11}", 1),
    # signs
    ("-7", "−7", 1),
    ("-7", "–7", 1),
    ("-7", "－7", 1),
    ("7", "−7", 0),
    ("−7", "-7", 1),
    ("-2", "5–7", 0),
    ("-2", "5 – 7", 1),
    ("42", "４２", 1),
    ("2\\pi", "2π", 1),
    ("3\\sqrt{2}", "3√2", 1),
    ("x^2", "x²", 1),
    # roots and pi
    (r"3\sqrt{2}", "3 sqrt(2)", 1),
    (r"3\sqrt{2}", "3", 0),
    (r"2\pi", "2 pi", 1),
    (r"\sin x", "sin x", 1),
    # nothing there
    ("", "", UNSURE),
    ("  ", "", UNSURE),
    ("???", "???", UNSURE),
    (r"\boxed{3", "3", UNSURE),
    (r"\frac{3}{4", "3/4", UNSURE),
    ("1/0", "1/0", UNSURE),
    (r"\boxed{}", "", UNSURE),
    (r"\boxed{\frac{3}{4}}", "0.75", 1),
    ("x" * 2000, "x", UNSURE),
]
FOUND = [  # label, response, verdict
    (r"\frac{3}{4}", r"\boxed{\frac{3}{4}", 0),
    ("3", r"\boxed{3", 0),
    ("3", r"\boxed{3}, no, \boxed{4", 0),
    ("-7", "The answer is −7.", 1),
    ("7", "The answer is −7.", 0),
    ("-7", "The answer is –7", 1),
    ("13/4", "The answer is 3 1/4.", 1),
    ("3", "The answer is 3 1/4.", 0),
    ("7500", "The answer is 7 500 dollars.", 1),
    ("7", r"The answer is 7\,500.", 0),
    (r"3\sqrt{2}", r"The answer is 3\sqrt{2}.", 1),
    ("3", r"The answer is 3\sqrt{2}.", 0),
    ("3", "The answer is 3√2.", 0),
    ("3", "It is 3 sqrt(2).", 0),
    (r"2\pi", "The area is 2π.", 1),
    ("2", "The area is 2π.", 0),
    ("2", "The area is 2 pi", 0),
    (r"\frac{3\pi}{4}", r"It is \frac{3}{4}\pi", 1),
    ("5", "The answer is 5 + x", 0),
    ("5", "The answer is x - 5", 0),
    ("-5", "The answer is x - 5", 0),
    ("5", "So the answer is x >= 5", 0),
    ("5", "x >= 5", 0),
    ("5", "The answer is 5 million.", 0),
    ("5000000", "The answer is 5 million.", 1),
    ("30", "We meet at 12:30", 0),
    ("12:30", "The answer is 12:30.", 1),
    ("42", "The answer is 42, because $x > 3$.", 1),
    ("42", "The answer is $42$, as $n$ is even.", 1),
    ("3, 5", "The answers are $3$ and $5$.", 1),
    ("50%", "The answer is $50$%.", 1),
    ("90", r"The angle is 90^\circ", 1),
    ("18", "so 18\n#### 18", 1),
    ("18", "So we have\n→ 18", 1),
    ("6", "The answer is $6, and that costs $5", 1),
    ("5", "The answer is $6, and that costs $5", 0),
    ("5", "The answer is 5 < x", 0),
    ("east", "The answer is east.", 1),
    ("east", "The answer is **East**, since the wind blows.", 1),
    ("east", "The answer is $\\text{east}$.", 1),
    ("east", "The answer is seat.", 0),
    ("east", "I go\neast", 1),
    ("east", "It is not east", 0),
    ("no", "no", 1),
    ("yes", r"\boxed{yes", 0),
]


@pytest.mark.parametrize(("label", "answer", "verdict"), WRITTEN)
def test_what_is_written(label, answer, verdict):
    check(label, rf"\boxed{{{answer}}}", verdict)


@pytest.mark.parametrize(("label", "response", "verdict"), FOUND)
def test_what_is_found(label, response, verdict):
    check(label, response, verdict)


def check(label, response, verdict):
    if verdict == UNSURE:
        with pytest.raises(ValueError, match="can't be read as mathematics"):
            judge(label, response)
    else:
        assert judge(label, response) == verdict


@settings(deadline=None)
@given(st.text("eilnst", min_size=2, max_size=8).filter(lambda word: word not in ("sin", "ln")), st.data())
def test_an_anagram_is_not_the_word(word, data):
    other = "".join(data.draw(st.permutations(word)))
    assert judge(word, rf"\boxed{{{other}}}") == (word == other)


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9), st.sampled_from(["{:,}", "{:_}", "{} dollars", "${}$", r"{}\text{{ m}}"]))
def test_an_integer_is_itself_however_it_is_written(number, form):
    written = form.format(number).replace("_", r"\,")
    for text in (written, written.replace("-", "−")):
        assert math_text.read(text).value == number


READABLE = {
    label for label, _, verdict in WRITTEN if verdict != UNSURE and "answer" not in label and "####" not in label
}


def test_a_label_is_the_answer_to_itself():
    assert [label for label in READABLE if judge(label, rf"\boxed{{{label}}}") != 1] == []
