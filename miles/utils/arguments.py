"""The command line of `train.py`."""

import sys

from miles.config.command_line import read_command_line
from miles.config.resolve import ConfigError, Resolved, resolve, resolve_command_line
from miles.config.run_config import RunConfig
from miles.config.show import config_text, help_text

__all__ = ["ConfigError", "Resolved", "parse_args", "resolve"]


def parse_args(argv: list[str] | None = None) -> RunConfig:
    """The checked configuration of a run, from `argv` (default: the program's own) and its YAML file.

    Prints and exits with status 0 on --help and --print-config, and on --check, there with status 1 where the run does
    not fit. Lists everything that is wrong on stderr and exits with status 2 where the configuration cannot run; use
    `resolve` for an exception instead.

    Raises:
        UserError: --check does not know the hardware, or the model.
    """
    line = read_command_line(sys.argv[1:] if argv is None else argv)
    if line.help:
        print(help_text())
        sys.exit(0)
    try:
        resolved = resolve_command_line(line)
    except ConfigError as error:
        count = len(error.problems)
        print(f"{count} problem{'s' * (count > 1)} with the configuration:\n{error}", file=sys.stderr)
        sys.exit(2)
    for warning in resolved.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if line.print_config:
        print(config_text(resolved))
        sys.exit(0)
    if line.check or line.check_hardware is not None:
        # Takes seconds, for torch and Megatron come with it.
        from miles.check.command import check

        sys.exit(check(resolved.config, line.check_hardware))
    return resolved.config
