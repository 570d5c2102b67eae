"""Small programs beside the training: `python -m miles.tools.NAME --help`."""

from collections.abc import Callable

import tyro

from miles.utils.errors import ends_in_a_sentence


def run(program: Callable[..., None], description: str) -> None:
    """Call program with its arguments from the command line; a user's mistake ends it with a sentence and status 1."""
    with ends_in_a_sentence():
        tyro.cli(program, description=description)
