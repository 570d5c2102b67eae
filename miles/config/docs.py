"""Write the page of flags: `python -m miles.config.docs > docs/user-guide/launch-flags.md`."""

from miles.config.names import flag_of, negation_of
from miles.config.run_config import SECTIONS
from miles.config.section import field_kind
from miles.config.show import default_text, value_hint

HEAD = """\
# Launch flags

Written by `python -m miles.config.docs` from the fields in `miles/config/`; a test keeps it current.

`python train.py` takes every flag below. `--config FILE.yaml` reads the same names with underscores
(`rollout_batch_size: 64`); the command line wins over the file. `--custom-config-path FILE.yaml` reads a file that
wins over the command line, and says where it does. A switch `--x` is turned off by `--no-x`. Lists are written `--x A
B`, dicts as one JSON object. `--print-config` shows each value and where it came from, and exits; `--check` says what
the run will need ([check.md](check.md)); `--help` lists the flags. Of a flag that is given several times the last
counts, with a warning where the values differ. Flags of Miles and slime that only say what config.json says, or what
is done anyway, are taken, and one warning names them. A flag that does not exist, or is abbreviated, is refused with
the nearest names, and all problems of a configuration are listed before anything starts. In a `PATH` `~` and `$NAME`
are filled in, a relative one starts at the working directory, and files and folders must be there, or be writable, on
the machine of the driver.
"""


def page() -> str:
    """The page, in Markdown."""
    lines = [HEAD.rstrip()]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", "| flag | default | meaning |", "| --- | --- | --- |"]
        for name, field in section.model_fields.items():
            if name == "sglang":
                flag = "`--sglang-NAME VALUE`"
            elif field_kind(field) == "bool":
                flag = f"`{flag_of(name)}`, `{negation_of(name)}`"
            else:
                flag = f"`{flag_of(name)} {value_hint(field)}`"
            lines.append(f"| {_cell(flag)} | {_cell(default_text(field))} | {_cell(str(field.description))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
