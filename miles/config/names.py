"""Field names and flags, and what a wrong one may have meant."""

import difflib
import os
import re
from collections.abc import Iterable

MOST = 3  # names that are suggested
# Below them a difference is no slip of the fingers.
SIMILAR = 0.85  # two whole names
SIMILAR_WORDS, SIMILAR_WORD = 0.75, 0.6  # the words of two names, on average and each
OFF = ("no", "disable", "without")


def flag_of(name: str) -> str:
    """`rollout_batch_size` gives `--rollout-batch-size`."""
    return "--" + name.replace("_", "-")


def negation_of(name: str) -> str:
    """The flag that turns a switch off: `--no-colocate` for colocate, `--save-optim` for no_save_optim."""
    return flag_of(name.removeprefix("no_")) if name.startswith("no_") else flag_of("no_" + name)


def nearest(wrong: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: its up to three nearest known names, or nothing.

    Best are names that begin with the wrong one, then those that have its words, in their order and maybe cut off.
    Where there are none, those that are spelled alike, whole or word by word up to where the wrong one ends; else those
    that share most words with it from the first on. What turns a switch off is not near to what turns one on.
    """
    words = _words(wrong)
    pairs = [(name, *_told_apart(words, _words(name))) for name in known]
    for nearness in (_completion, _likeness, _shared_beginning):
        scored = [(score, name) for name, ours, theirs in pairs if (score := nearness(ours, theirs)) is not None]
        if scored:
            return f"; did you mean {' or '.join(name for _, name in sorted(scored)[:MOST])}?"
    return ""


def _words(name: str) -> list[str]:
    return re.split("[-_]+", name.lower().lstrip("-"))


def _told_apart(words: list[str], others: list[str]) -> tuple[list[str], list[str]]:
    """Both without the `sglang` in front, which hundreds have; none of the other where one alone turns things off."""
    if words[0] == others[0] == "sglang":
        return words[1:], others[1:]
    return words, others if (words[0] in OFF) == (others[0] in OFF) else []


# Of the words of two names, how near they are: smaller is nearer, None is something else.


def _completion(words: list[str], others: list[str]) -> tuple[int, int] | None:
    name = "-".join(others)
    if name.startswith("-".join(words)):
        return 0, len(name)
    rest = iter(others)
    in_order = all(any(other.startswith(word) for other in rest) for word in words)
    return (1, len(name)) if in_order and len(words) > 1 else None


def _shared_beginning(words: list[str], others: list[str]) -> int | None:
    shared = len(os.path.commonprefix([words, others]))
    enough = shared > 1 and (shared == len(others) or shared > max(2, len(words) / 2))
    return -shared if enough else None


def _likeness(words: list[str], others: list[str]) -> float | None:
    whole = _alike("-".join(words), "-".join(others))
    if len(words) <= len(others):
        each = [_alike(word, other) for word, other in zip(words, others, strict=False)]
        if min(each) >= SIMILAR_WORD and sum(each) / len(each) >= SIMILAR_WORDS:
            return -max(whole, sum(each) / len(each))
    return -whole if whole >= SIMILAR else None


def _alike(one: str, other: str) -> float:
    return 1.0 if other.startswith(one) else difflib.SequenceMatcher(None, one, other).ratio()
