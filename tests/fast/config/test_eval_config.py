import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.config.eval_config import SETTINGS, EvalSetConfig, eval_set_configs

FILE = """
defaults:
  temperature: 0
  n_samples_per_eval_prompt: 4
  stop: ["\\n"]
datasets:
  - name: easy
    path: easy.jsonl
  - name: hard
    path: 'hard.jsonl@[:100]'
    rm_type: math
    temperature: 0.6
    stop: null
    metadata_overrides: {level: 3, tags: [a, null]}
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        file = tmp_path / "eval.yaml"
        file.write_text(text, encoding="utf-8")
        sets, problems = eval_set_configs(None, str(file))
        return sets, [problem.replace(str(file), "FILE") for problem in problems]

    return read


def test_sets_and_their_defaults(read):
    (easy, hard), problems = read(FILE)
    assert problems == []
    assert (easy.name, easy.path) == ("easy", str(Path("easy.jsonl").absolute()))
    assert (hard.name, hard.path) == ("hard", str(Path("hard.jsonl@[:100]").absolute()))
    assert easy.given("temperature", 9) == 0 and hard.given("temperature", 9) == 0.6
    assert easy.given("n_samples_per_eval_prompt", 9) == hard.given("n_samples_per_eval_prompt", 9) == 4
    assert easy.given("stop", 9) == ["\n"] and hard.given("stop", 9) is None
    assert easy.given("top_p", 9) == 9 and easy.rm_type is None and hard.rm_type == "math"
    assert hard.metadata_overrides == {"level": 3, "tags": ["a", None]} and easy.metadata_overrides == {}


@pytest.mark.parametrize(
    "text",
    [
        "eval: {datasets: [{name: a, path: p}]}",
        "datasets: {a: {path: p}}",
        '{"datasets": [{"name": "a", "path": "p"}]}',
        "defaults:\ndatasets: [{name: a, path: p}]",
    ],
)
def test_other_ways_to_write_it(read, text):
    (only,), problems = read(text)
    assert problems == [] and (only.name, only.path) == ("a", str(Path("p").absolute()))


def test_every_setting_can_be_a_default(read):
    values = {
        **dict.fromkeys(("input_key", "label_key", "tool_key", "metadata_key"), "key"),
        "rm_type": "math",
        "stop": ["x"],
        "stop_token_ids": [1],
        "metadata_overrides": {"a": 1},
        "custom_generate_function_path": "a.b",
    }
    for name in SETTINGS:
        value = values.get(name, 1)
        (only,), problems = read(f"defaults: {{{name}: {value!r}}}\ndatasets: [{{name: a, path: p}}]")
        assert problems == [] and only.given(name, None) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults: {temperatur: 0}\ndatasets: [{name: a, path: p}]",
         "--eval-config FILE: defaults: key temperatur is unknown; did you mean temperature?"),
        ("defaults: {path: p}\ndatasets: [{name: a, path: p}]", "--eval-config FILE: defaults: key path is unknown"),
        ("default: {temperature: 0}\ndatasets: [{name: a, path: p}]",
         "--eval-config FILE: key default is unknown; did you mean defaults?"),
        ("datasets: [{name: a, path: p, n_samples: 2}]", "--eval-config FILE: set a: key n_samples is unknown"),
        ("datasets: [{name: a, path: p, max_response_length: 2}]",
         "--eval-config FILE: set a: key max_response_length is unknown; did you mean max_response_len?"),
        ("datasets: [{name: a, path: p, temperature: hot}]",
         "--eval-config FILE: set a: temperature is 'hot': input should be a valid number"),
        ("defaults: {top_p: 2}\ndatasets: [{name: a, path: p}]",
         "--eval-config FILE: set a: top_p is 2: input should be less than or equal to 1"),
        ("datasets: [{name: a, path: p, temperature: null}]",
         "--eval-config FILE: set a: temperature is None: input should be a valid number"),
        ("datasets: [{name: a, path: p, min_new_tokens: true}]",
         "--eval-config FILE: set a: min_new_tokens is True: a number is needed here, not true or false"),
        ("datasets: [{name: a, path: p, rm_type: bleu}]", "--eval-config FILE: set a: rm_type is 'bleu': input should"),
        ("datasets: [{name: a, path: p, stop: ['']}]",
         "--eval-config FILE: set a: stop is ['']: an empty text ends every response at its first token"),
        ("datasets: [{name: a, path: p, stop: [1]}]", "--eval-config FILE: set a: stop[0] is 1: input should be"),
        ("datasets: [{name: a, path: p, metadata_overrides: {day: 2026-01-01}}]",
         "--eval-config FILE: set a: metadata_overrides[day] is datetime.date(2026, 1, 1): input was not a valid JSON"),
        ("datasets: [{name: a b, path: p}]",
         "--eval-config FILE: set a b: name is 'a b': a name without white space or slash is needed"),
        ("datasets: [{name: a}]", "--eval-config FILE: set a has no path; a name and a path are required"),
        ("datasets: [{path: p}]", "--eval-config FILE: set {'path': 'p'} has no name; a name and a path are required"),
        ("datasets: [a]", "--eval-config FILE: set 1 is 'a'; settings as `name: value` lines are allowed"),
        ("datasets: {a: p}", "--eval-config FILE: set 1 is 'p'; settings as `name: value` lines are allowed"),
        ("defaults: 1\ndatasets: [{name: a, path: p}]", "--eval-config FILE: defaults is 1; settings as"),
        ("datasets: [{name: a, path: p}, {name: a, path: q}]",
         "--eval-config FILE has the name a more than once; name each set differently"),
        ("datasets: []", "--eval-config FILE must hold `datasets`, a list of sets with `name` and `path`"),
        ("", "--eval-config FILE must hold `datasets`, a list of sets with `name` and `path`"),
        ("[1]", "--eval-config FILE must hold `datasets`, a list of sets with `name` and `path`"),
        ("eval: 1", "--eval-config FILE must hold `datasets`, a list of sets with `name` and `path`"),
        ("datasets: [{name: a, path: p, path: q}]", "--eval-config FILE is not valid YAML: key 'path' is given twice"),
        ("a: [", "--eval-config FILE is not valid YAML: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(read, text, expected):
    _, (problem,) = read(text)
    assert problem.startswith(expected)


def test_all_problems_come_together(read):
    _, problems = read("defaults: {a: 1}\ndatasets: [{name: x, path: p, b: 1, top_p: 2}, {name: y}]")
    assert len(problems) == 4


def test_pairs_on_the_command_line():
    sets, problems = eval_set_configs(["a", "p", "b", "q"], None)
    assert problems == [] and sets == [EvalSetConfig(name="a", path="p"), EvalSetConfig(name="b", path="q")]
    assert eval_set_configs(None, None) == ([], [])


def test_a_missing_file(tmp_path):
    assert eval_set_configs(None, str(tmp_path / "no"))[1] == [
        f"--eval-config {tmp_path / 'no'} cannot be read: No such file or directory"
    ]


def test_it_imports_no_torch():
    code = "import sys, miles.config.evaluation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONSAFEPATH": "1"}).returncode == 0
