"""Small programs beside the training: `python -m miles.tools.NAME --help`."""

import sys
from collections.abc import Callable

import tyro


def run(program: Callable[..., None], description: str) -> None:
    """Call program with its arguments from the command line; a user's mistake ends it with a sentence and status 1."""
    try:
        tyro.cli(program, description=description)
    except ValueError as error:
        sys.exit(f"error: {error}")
