"""Reading the files in `sentences/`: command lines, and what a user is told of each.

    SPLIT: --rollout-num-gpus 1 (without --colocate)   a name for flags
    config.json: {"vocab_size": 260}                   laid over the model's, for all that follows
    file s/0.jsonl: text                               another file, for all that follows

    $ SPLIT --one-step-ahead --fully-async
    refused: a sentence,
        and its next line

Flags are laid over those of a run that is right (`good` in conftest.py), and what stands in `(without ...)` is taken
out of what stands before it. Under a command line, `config.json:` and `file` are for it alone. It is `accepted`, or
there are one or more sentences, each `refused:` or, of a run that starts all the same, `warned:`.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "sentences"
WITHOUT = re.compile(r"\(without ([^)]*)\)")


@dataclass
class Case:
    """A command line, the files it finds, and what is printed."""

    written: str
    changes: dict[str, list[str] | None]
    files: dict[str, str]
    config_json: str = "{}"
    outcome: list[str] = field(default_factory=list)


def read_cases(file: Path) -> list[Case]:
    """All command lines of a file, in their order."""
    names: dict[str, str] = {}
    common = Case("", {}, {})
    cases: list[Case] = []
    for line in _joined(file.read_text(encoding="utf-8").splitlines()):
        case = cases[-1] if cases else common
        key, _, rest = line.partition(": ")
        if line == "$" or line.startswith("$ "):
            cases.append(Case(line, _changes(line[2:], names), dict(common.files), common.config_json))
        elif key == "config.json":
            case.config_json = rest
        elif key.startswith("file "):
            case.files[key.removeprefix("file ").rstrip(":")] = rest
        elif line == "accepted" or key in ("refused", "warned"):
            case.outcome.append(line)
        elif re.fullmatch("[A-Z0-9_]+", key):
            names[key] = rest
        else:
            raise ValueError(f"{file.name}: {line}")
    return cases


def _joined(lines: list[str]) -> list[str]:
    """Without remarks and empty lines, and with what is indented behind the line before."""
    joined: list[str] = []
    for line in lines:
        if line.startswith("    "):
            joined[-1] += " " + line.strip()
        elif line.strip() and not line.startswith("#"):
            joined.append(line.rstrip())
    return joined


def _changes(text: str, names: dict[str, str]) -> dict[str, list[str] | None]:
    while any(word in names for word in text.split()):
        text = " ".join(names.get(word, word) for word in text.split(" "))
    changes: dict[str, list[str] | None] = {}
    for place, part in enumerate(WITHOUT.split(text)):
        if place % 2:
            changes |= dict.fromkeys(part.split())
            continue
        for word in shlex.split(part):
            if word.startswith("--"):
                flag, changes[word] = word, []
            else:
                changes[flag].append(word)
    return changes
