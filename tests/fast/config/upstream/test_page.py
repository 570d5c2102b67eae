"""docs/getting-started/coming-from-miles.md says what is so."""

import re
from pathlib import Path

from miles.config import RunConfig
from miles.config.command_line import KNOWN_FLAGS
from miles.config.sglang_args import server_arguments
from miles.config.upstream.absent import row_of
from miles.config.upstream.flags import MEANT, RENAMED

PAGE = (Path(__file__).parents[4] / "docs" / "getting-started" / "coming-from-miles.md").read_text()


def test_flags_are_those_of_the_tables():
    flags = {flag for code in re.findall("`([^`]+)`", PAGE) for flag in re.findall(r"--[a-z0-9-]+", code)}
    sglang = {f"--sglang-{name.replace('_', '-')}" for name in server_arguments()}
    assert len(flags) > 40
    assert not {flag for flag in flags if row_of(flag) is None} - {*KNOWN_FLAGS, *MEANT, *RENAMED, *sglang}


def test_defaults_are_the_configurations():
    table = PAGE.partition("## Defaults that differ")[2].partition("\n\nUnset")[0]
    rows = re.findall(r"^\| `--([a-z-]+)` \| [^|]+ \| ([^|]+) \|", table, re.M)
    said = {flag.replace("-", "_"): value for flag, value in rows}
    shown = {True: "on", False: "off"}
    assert len(said) == 4
    for name, value in said.items():
        default = RunConfig.model_fields[name].default
        assert value == str(shown.get(default, default) if isinstance(default, bool) else default), name
