"""The configuration of a run: one section of fields a file, derived values, checks, and the command line."""

from miles.config.run_config import RunConfig

__all__ = ["RunConfig"]
