import json
import re
import subprocess
import sys

import pytest

from miles.rollout.prompts.data_source import PromptDataset
from miles.rollout.prompts.prompt_format import PromptFormat
from miles.tools.make_prompts import make_prompts
from miles.tools.make_tiny_checkpoint import byte_tokenizer


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_reverse_and_its_held_out_prompts(tmp_path):
    train, held_out = tmp_path / "train.jsonl", tmp_path / "deep" / "eval.jsonl"
    make_prompts("reverse", 500, train)
    make_prompts("reverse", 100, held_out, exclude=(train,))
    for row in rows(train) + rows(held_out):
        digits = re.fullmatch(r"rev (\d{3,6})", row["input"])[1]
        assert row["label"] == digits[::-1] and row["metadata"] == {"task": "reverse"}
    prompts = [row["input"] for row in rows(train) + rows(held_out)]
    assert len(set(prompts)) == len(prompts) == 600
    assert {len(prompt) for prompt in prompts} == {7, 8, 9, 10}


def test_addition_is_right(tmp_path):
    make_prompts("addition", 300, tmp_path / "a.jsonl", seed=5)
    for row in rows(tmp_path / "a.jsonl"):
        a, b = re.fullmatch(r"What is (\d\d) \+ (\d\d)\? Answer with the number only\.", row["input"]).groups()
        assert int(a) + int(b) == int(row["label"])


def test_a_seed_gives_one_file(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_prompts("reverse", 50, tmp_path / f"{name}.jsonl", seed=seed)
    a, b, c = ((tmp_path / f"{name}.jsonl").read_bytes() for name in "abc")
    assert a == b != c


def test_the_whole_task_can_be_drawn_and_no_more(tmp_path):
    make_prompts("addition", 8000, tmp_path / "a.jsonl")
    make_prompts("addition", 100, tmp_path / "b.jsonl", exclude=(tmp_path / "a.jsonl",))
    with pytest.raises(ValueError, match="only 0 new distinct prompts .* ask for fewer"):
        make_prompts("addition", 1, tmp_path / "c.jsonl", exclude=(tmp_path / "a.jsonl", tmp_path / "b.jsonl"))
    assert not (tmp_path / "c.jsonl").exists()


def test_mistakes_are_refused(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n')
    for changes, message in [
        ({"task": "sort"}, "allowed are reverse, addition and rg:NAME"),
        ({"num": 0}, "at least 1"),
        ({"output": tmp_path / "a.txt"}, "must end in .jsonl"),
        ({"exclude": (tmp_path / "broken.jsonl",)}, "broken.jsonl:1: no input"),
        ({"exclude": (tmp_path / "none.jsonl",)}, "does not exist"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_prompts(**({"task": "reverse", "num": 3, "output": tmp_path / "a.jsonl"} | changes))


def test_reasoning_gym(tmp_path):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for task in ("chain_sum", "graph_color"):
        make_prompts(f"rg:{task}", 20, tmp_path / f"{task}.jsonl")
    for row in rows(tmp_path / "chain_sum.jsonl"):
        entry = row["metadata"]["entry"]
        assert row["metadata"] == {"task": "rg:chain_sum", "entry": entry} and entry["question"] == row["input"]
        score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        assert score(row["label"], entry) == 1 > score(f"{row['label']}0", entry)
    assert all(row["label"] is None and row["metadata"]["entry"] for row in rows(tmp_path / "graph_color.jsonl"))
    for task, message in [
        ("chain_sums", "no such data set; it has .*chain_sum"),
        ("composite", "cannot be used as it is: Must specify"),
        ("arc_agi", "needs what JSON does not keep"),
    ]:
        with pytest.raises(ValueError, match=f"rg:{task}: .*{message}"):
            make_prompts(f"rg:{task}", 20, tmp_path / "b.jsonl")
    data = PromptDataset(str(tmp_path / "graph_color.jsonl"), byte_tokenizer(), PromptFormat(), None)
    assert len(data) == 20 and data[0].metadata["entry"]["answer"] is None and data[0].label is None


def test_a_missing_reasoning_gym_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        make_prompts("rg:chain_sum", 20, tmp_path / "a.jsonl")


def test_command_line(tmp_path):
    def call(*flags):
        command = [sys.executable, "-m", "miles.tools.make_prompts", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    output = str(tmp_path / "a.jsonl")
    done = call("--task", "reverse", "--num", "3", "--output", output)
    assert done.returncode == 0 and "3 prompts of reverse" in done.stdout
    failed = call("--task", "sort", "--num", "3", "--output", output)
    assert failed.returncode == 1 and failed.stderr.startswith("error: --task sort: allowed are")
