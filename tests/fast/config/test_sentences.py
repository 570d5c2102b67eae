"""What each section says of command lines, as `sentences/` has it, and that each of its rules has something to say."""

import json
from contextlib import contextmanager

import pytest
from pydantic import ValidationError

from miles.config import validate
from miles.config.resolve import ConfigError, resolve
from miles.config.run_config import SECTIONS
from tests.fast.config.sentences import FOLDER, read_cases

ROOMS = {section.__module__.rsplit(".", 1)[-1]: section for section in SECTIONS}
FILES = {file.stem: file for file in sorted(FOLDER.glob("*.txt"))}


@contextmanager
def files_of(case, folder):
    """The files of one command line, in the working directory."""
    config_json = folder / "model" / "config.json"
    before = config_json.read_text()
    config_json.write_text(json.dumps(json.loads(before) | json.loads(case.config_json)))
    for name, text in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    yield
    config_json.write_text(before)
    for name in case.files:
        (folder / name).unlink()


def outcome(case, good, folder):
    """What is printed of a command line, in the words of the files."""
    flags = {flag: value.split() for flag, value in good.items()} | case.changes
    argv = [word for flag, values in flags.items() if values is not None for word in (flag, *values)]
    try:
        said = [f"warned: {warning}" for warning in resolve(argv).warnings] or ["accepted"]
    except ConfigError as error:
        said = [f"refused: {problem}" for problem in error.problems]
    except ValidationError:  # without the rule that refuses them, values that no configuration can have
        said = []
    return [line.replace(str(folder), "HERE") for line in said]


class Speaking:
    """A rule that notes what it says."""

    def __init__(self, rule, kind):
        self.rule, self.kind, self.said = rule, kind, []

    def __call__(self, v):
        for sentence in self.rule(v):
            self.said.append(sentence)
            yield sentence


@pytest.mark.parametrize("room", FILES)
def test_what_is_said(room, good, folder, monkeypatch):
    """Each rule of the section refuses a command line of its file, and no other rule would have refused it so."""
    rules = [Speaking(rule, "RULES") for rule in validate.RULES]
    rules += [Speaking(rule, "WARNINGS") for rule in validate.WARNINGS]

    def without(absent):
        for kind in ("RULES", "WARNINGS"):
            monkeypatch.setattr(validate, kind, [rule for rule in rules if rule.kind == kind and rule is not absent])

    wrong, silent = [], {rule.rule for rule in rules if belongs(rule.rule, room)}
    for case in read_cases(FILES[room]):
        with files_of(case, folder):
            for rule in rules:
                rule.said = []
            without(None)
            said = outcome(case, good, folder)
            if said != case.outcome:
                wrong.append("\n".join((case.written, *said)))
            for rule in [rule for rule in rules if rule.said and belongs(rule.rule, room)]:
                without(rule)
                silent.discard(rule.rule)
                if outcome(case, good, folder) == said:
                    wrong.append(f"{case.written}\nis the same without the rule {rule.rule.__name__}")
    assert not wrong, "\n\n".join(wrong)
    assert not [rule.__name__ for rule in silent], f"no command line of {room}.txt hears of these"


def test_every_section_with_rules_has_a_file():
    rules = [rule for rule in (*validate.RULES, *validate.WARNINGS) if rule is not validate.tried_texts]
    rooms = {room for room in ROOMS for rule in rules if belongs(rule, room)}
    assert rooms == set(FILES)
    assert all(any(belongs(rule, room) for room in rooms) for rule in rules)


def belongs(rule, room):
    """Whether a rule or warning is one of the section's."""
    section = ROOMS[room]
    return rule.__module__ == section.__module__ or getattr(rule, "name", None) in section.model_fields
