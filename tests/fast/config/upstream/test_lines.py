"""Command lines as people write them who come from Miles or slime: `lines.txt` says what is said of each."""

import json
import re
import shlex
from pathlib import Path

import pytest

from miles.config.resolve import ConfigError, resolve

HERE = Path(__file__).parent
PUBLISHED = HERE.parents[1] / "scripts" / "published"
MODELS = json.loads((HERE / "models.json").read_text())
NOTHING = re.compile(r"([0-9]+) flags? of Miles or slime changes? nothing .*?\): (.*)")


def read_lines():
    """Of each command line its number in the file, its model, its words and what is said of it."""
    names, cases = {}, []
    text = re.sub(r"\n    +", " ", (HERE / "lines.txt").read_text())
    for line in text.splitlines():
        key, _, rest = line.partition(": ")
        if line.startswith("$ "):
            cases.append((len(cases) + 1, key[2:], expanded(rest, names), []))
        elif key in ("accepted", "warned", "refused"):
            cases[-1][3].append((key, rest))
        elif line and not line.startswith("#"):
            names[key] = rest
    return cases


def expanded(text, names):
    words = []
    for word in shlex.split(text):
        words += expanded(names[word], names) if word in names else [word]
    return words


CASES = read_lines()


@pytest.fixture
def there(tmp_path, monkeypatch):
    """The folders and files that the lines name."""
    for folder, marked in (("torch", "release"), ("ckpt", "19")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "latest_checkpointed_iteration.txt").write_text(marked + "\n")
    (tmp_path / "hf").mkdir()
    for name in ("train.jsonl", "aime.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("number", "model", "words", "said"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_a_line(number, model, words, said, there):
    published = PUBLISHED / f"{model}.json"
    content = published.read_text() if model not in MODELS else json.dumps(MODELS[model])
    (there / "hf" / "config.json").write_text(content)
    try:
        warnings = resolve(words).warnings
        named = [match for warning in warnings if (match := NOTHING.fullmatch(warning))]
        assert all(len(re.split(", (?=--)", match[2])) == int(match[1]) for match in named)
        heard = [("accepted", match[1]) for match in named] or [("accepted", "0")]
        heard += [("warned", warning) for warning in warnings if not NOTHING.fullmatch(warning)]
    except ConfigError as error:
        heard = [("refused", problem) for problem in error.problems]
    shown = "\n".join(": ".join(one) for one in heard)
    assert len(heard) == len(said), shown
    for kind, part in said:
        assert any(kind == one and (part == text if kind == "accepted" else part in text) for one, text in heard), shown
