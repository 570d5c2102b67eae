"""The class of the sentences that are written for a user."""


class UserError(ValueError):
    """What a user can set right: its text says what was given, what is allowed and what to do.

    A run that one ends prints the sentence alone; any other exception is a fault of the program or of what it runs on,
    and shows its traceback.
    """
