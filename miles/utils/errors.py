"""The class of the sentences that are written for a user, and errors in one line."""


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
