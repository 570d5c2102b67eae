"""The class of the sentences that are written for a user, errors in one line, and how a command ends in one."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # exit code of a program that Ctrl-C ended: 128 and the signal's number


class UserError(ValueError):
    """What a user can set right: its text says what was given, what is allowed and what to do.

    A run that one ends prints the sentence alone; any other exception is a fault of the program or of what it runs on,
    and shows its traceback.
    """


class AnotherRankFailed(RuntimeError):
    """This trainer rank is well and goes no further, for it has heard of another one's failure."""


def one_line(error: BaseException) -> str:
    """Type and message, and the notes that were added to it."""
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return "; ".join(" ".join(line.split()) for line in lines)


@contextmanager
def ends_in_a_sentence() -> Iterator[None]:
    """Around a whole command: a UserError ends it in its sentence and exit code 1, Ctrl-C in silence.

    Everything else passes, and Python shows its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        sys.exit(f"error: {sentence}")


def sentence_of(
    error: BaseException, inside: Callable[[BaseException], BaseException] = lambda error: error
) -> str | None:
    """What `error` says to a user, with the notes that were added to it; None if a user cannot set it right.

    A group of exceptions speaks to a user if all of its members do.

    Args:
        inside: what a transport wrapped in an exception, or the exception itself.
    """
    cause = inside(error)
    if isinstance(cause, BaseExceptionGroup):
        members = [sentence_of(member, inside) for member in cause.exceptions]
        parts = [sentence for sentence in members if sentence is not None]
        if len(parts) != len(members):
            return None
    elif isinstance(cause, UserError):
        parts = [str(cause)]
    else:
        return None
    # A wrapper may have notes of its own, or show those of what it wraps.
    notes = [note for one in (cause, error) for note in getattr(one, "__notes__", ())]
    return "\n".join(dict.fromkeys([*parts, *notes]))
