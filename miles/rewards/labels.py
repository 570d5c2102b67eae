"""Which labels the built-in rewards can use: asked when prompts are read, so that none fails its samples later.

The check of a label takes some 0.2 ms with mathematics, which is not parsed yet, and less with the others. What only
parsing shows, such as 0/0 or LaTeX that latex2sympy has no grammar for, is an error of each sample.
"""

from collections.abc import Callable

from miles.config.reward import WITHOUT_LABEL
from miles.rewards import code, dapo, exact, f1, gpqa, math_text
from miles.rewards.answers import unboxed
from miles.utils.errors import UserError

_READ: dict[str, Callable[[str], object]] = {
    "exact": exact.read_label,
    "math": math_text.read_label,
    "dapo": dapo.read_label,
    "deepscaler": math_text.read_label,
    "f1": f1.read_label,
    "gpqa": gpqa.read_label,
    "code": code.read_tests,
    "boxed_exact": lambda label: exact.read_label(unboxed(label)),
    "boxed_math": math_text.read_label,
    "boxed_f1": lambda label: f1.read_label(unboxed(label)),
    "boxed_gpqa": gpqa.read_label,
}


def check_choice(name: str, label: str | None) -> None:
    """Raise ValueError if there is no built-in reward `name`, or it needs a label and that is None."""
    if name not in WITHOUT_LABEL and (not isinstance(name, str) or name not in _READ):
        raise UserError(f"metadata names the reward {name!r}; it must be one of {', '.join([*_READ, *WITHOUT_LABEL])}")
    if label is None and name not in WITHOUT_LABEL:
        raise UserError(f"the reward {name} compares with a label, and the sample has none")


def check_label(name: str, label: str | None) -> None:
    """Raise ValueError as `check_choice` does, or if the reward can't use this label."""
    check_choice(name, label)
    if name not in WITHOUT_LABEL:
        _READ[name](label)
