"""Field names and flags, and what a wrong one may have meant."""

import difflib
from collections.abc import Iterable


def flag_of(name: str) -> str:
    """`rollout_batch_size` gives `--rollout-batch-size`."""
    return "--" + name.replace("_", "-")


def negation_of(name: str) -> str:
    """The flag that turns a switch off: `--no-colocate` for colocate, `--save-optim` for no_save_optim."""
    return flag_of(name.removeprefix("no_")) if name.startswith("no_") else flag_of("no_" + name)


def nearest(wrong: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: its up to three nearest known names, or nothing."""
    matches = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
