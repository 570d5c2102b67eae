"""What the run says on screen besides its report."""

import logging


def configure_logging() -> None:
    """Show Miles' own messages from INFO on, and others' from WARNING on. Call it once in each process."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("miles").setLevel(logging.INFO)
