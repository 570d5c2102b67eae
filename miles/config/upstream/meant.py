"""How a flag of Miles or slime that is none of ours is read, and what it is compared with."""

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.config.values import Undetermined, Values
from miles.hf.described import DescribedModel
from miles.utils.errors import UserError

MOST_LAYERS = 10_000  # in a text such as [1]*48

Words = Sequence[str]
Said = Callable[[DescribedModel], Any]


@dataclass(frozen=True)
class Meant:
    """A flag that changes nothing here, as long as it says what is so anyway.

    Args:
        read: the value of the words behind the flag, None of a switch. Raises UserError where they are of another form.
        said: what the model says, None where nothing can contradict. Raises KeyError where config.json lacks a key.
        source: where that stands.
        agrees: whether a value and what is said are the same.
        note: for the user, behind the flag: what is so anyway.
        only: what the rest of the configuration says against it.
    """

    read: Callable[[Words], Any]
    said: Said
    source: str = "config.json"
    agrees: Callable[[Any, Any], bool] = lambda value, said: value == said
    note: str = ""
    only: Callable[[Values], str | None] = lambda v: None

    def contradiction(self, flag: str, words: Words, v: Values, model: DescribedModel | None) -> str | None:
        """What is wrong with the flag in one sentence; None where it says what is so anyway.

        Args:
            flag: with its dashes.
            words: behind it.
            v: the configuration.
            model: that of --hf-checkpoint, None where its config.json cannot be read.
        """
        try:
            value = self.read(words)
            if problem := self.only(v):
                return f"{flag}: {problem}; leave the flag out"
            said = None if model is None else self.said(model)
        except UserError as error:
            return f"{flag} {error}"
        except (KeyError, Undetermined):
            return None
        if said is None or self.agrees(value, said):
            return None
        written = " ".join((flag, *words))
        shown = ("yes" if said else "no") if isinstance(said, bool) else said
        if isinstance(said, set):
            shown = " or ".join(sorted(said))
        return (
            f"{written} contradicts the model of --hf-checkpoint, of which {self.source} says {shown}; leave the flag "
            "out, or correct one of them"
        )


def _only(words: Words) -> str:
    if len(words) != 1:
        raise UserError(f"takes one value, got {len(words)}{': ' if words else ''}{' '.join(words)}")
    return words[0]


def _nothing(words: Words) -> None:
    if words:
        raise UserError(f"takes no value, got {' '.join(words)}")


def _number(words: Words) -> float:
    text = _only(words)
    try:
        return float(text)
    except ValueError:
        raise UserError(f"is {text!r}: a number is needed") from None


def _key(*keys: str) -> Said:
    return lambda model: model.get(*keys)


def number(said: Said | str, *more: str) -> Meant:
    """One number, which the model says, or a key of config.json, the first of several that is there."""
    source = said if isinstance(said, str) else "config.json"
    return Meant(_number, _key(said, *more) if isinstance(said, str) else said, source, _close)


def _close(value: float, said: Any) -> bool:
    return isinstance(said, int | float) and math.isclose(value, said, rel_tol=1e-6)


def word(said: Said, *also: str) -> Meant:
    """One word, which the model says; `also` are words that never contradict."""
    return Meant(_only, said, agrees=lambda value, said: value in (said, *also))


def switch(said: Said = lambda model: None) -> Meant:
    """A flag without a value, of what the model has."""
    return Meant(_nothing, said, agrees=lambda value, said: bool(said))


def layers(said: Said) -> Meant:
    """For each layer 0 or 1, as `[0]*3+[1]*58`, or a number n: 1 in every n-th."""
    return Meant(_pattern, said, agrees=_same_layers)


def numbers(said: Said, agrees: Callable[[Any, Any], bool]) -> Meant:
    """Several numbers, and when they agree with what the model says."""
    return Meant(_pattern, said, agrees=agrees)


def either(*texts: str, only: str = "", note: str = "") -> Meant:
    """One of these words, which all mean what is done anyway; of others, `only` says why they are not possible."""
    reason = only or f"it is {' or '.join(texts)}"

    def read(words: Words) -> str:
        if _only(words) not in texts and not (_is_number(words[0]) and float(words[0]) in map(_as_number, texts)):
            raise UserError(f"{words[0]} is not possible here: {reason}; leave the flag out")
        return words[0]

    return Meant(read, lambda model: None, note=note)


def anything(note: str = "") -> Meant:
    """Any values: what they choose among is not a choice here."""
    return Meant(lambda words: None, lambda model: None, note=note)


def anyway(note: str = "", only: Callable[[Values], str | None] = lambda v: None) -> Meant:
    """A flag without a value, of what is done anyway."""
    return Meant(_nothing, lambda model: None, note=note, only=only)


def _is_number(text: str) -> bool:
    return not math.isnan(_as_number(text))


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _same_layers(value: Any, said: list[int]) -> bool:
    if isinstance(value, int):
        value = [int(layer % value == 0) for layer in range(len(said))]
    return value == said


def _pattern(words: Words) -> Any:
    """What `([0]*3)+[1]*58`, `128,0`, `0 1 1` or `4` holds: a number or a list of them."""
    text = " ".join(words)
    try:
        return _value(ast.parse(text if "," in text or "[" in text else ",".join(words), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        raise UserError(f"is {text!r}: numbers are needed, such as 4 or [0]*3+[1]*58") from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=ast.List() | ast.BinOp() as left, op=ast.Mult(), right=ast.Constant(value=int(count))):
            numbers = _value(left)
            if len(numbers) * count > MOST_LAYERS:
                raise ValueError(ast.unparse(node))
            return numbers * count
    raise ValueError(ast.unparse(node))
