import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from miles.rollout.sample_io import save_samples
from miles.tools import show_samples as module
from miles.tools.make_tiny_checkpoint import byte_tokenizer
from miles.tools.show_samples import escaped, show_samples
from miles.utils.types import Sample

ATTACK = "\x1b[2J\x1b]0;title\x07\r\x9b31m\x08\x7f \u202eright\u2066 a\u200bb [bold]x[/bold] :smile:\n| forged\ttab"


def answer(index, text, group=0, **fields):
    tokens = list(text.encode())
    return Sample(
        group_index=group,
        index=index,
        prompt="rev 12",
        tokens=[*b"rev 12", *tokens],
        response=text,
        response_length=len(tokens),
        status=Sample.Status.COMPLETED,
        **fields,
    )


@pytest.fixture
def tokenizer(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def shown(tmp_path, capsys):
    def show(*samples, hf_checkpoint=None, evaluation=None, **options):
        template = str(tmp_path / "{rollout_id}.jsonl")
        show_samples(
            save_samples(template, 7, [samples], evaluation=evaluation, hf_checkpoint=hf_checkpoint), **options
        )
        return capsys.readouterr().out

    return show


def test_what_is_known_of_a_sample(shown):
    sample = answer(4, "21", reward=0.25, label="21", metadata={"task": "é"}, loss_mask=[1, 1], remove_sample=True)
    sample.weight_versions, sample.weight_version_lengths = ["3", "5"], [1, 1]
    text = shown(sample, answer(5, "12"))
    head, _, about, *rest = text.splitlines()
    assert head.endswith("7.jsonl: rollout 7, 2 sample(s) of 1 group(s); mean reward 0.25 of 1; 2 completed")
    assert about == (
        "sample 4 of group 0  reward 0.25  completed  prompt 6 tokens  response 2, 0 trained  weights 3 (1 tokens), 5 "
        "(1 tokens)  removed: nothing of it is trained on"
    )
    assert rest[:8] == ["prompt", "┆ rev 12", "label", "┆ 21", "response", "┆ 21", "metadata", '┆ {"task": "é"}']
    assert "sample 5 of group 0  reward none  completed" in rest[9] and rest[-1] == "│ 12"


def test_parts_that_are_not_trained_on(shown, tokenizer):
    sample = answer(0, "12+3\n=15é.", loss_mask=[1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1])
    assert "response\n│ 12+3\n┆ \n┆ =15é\n│ .\n" in shown(sample, hf_checkpoint=tokenizer)
    text = shown(sample, hf_checkpoint="/not/here")
    assert "│ 12+3\n│ =15é.\nnot trained on: response tokens 4 to 9; --tokenizer FOLDER shows which text" in text
    assert "┆ =15é\n" in shown(sample, tokenizer=Path(tokenizer))


def test_each_token(shown, tokenizer):
    sample = answer(0, "a\n", loss_mask=[1, 0], rollout_log_probs=[-0.25, 0.0], teacher_log_probs=[-1.5, -2.0])
    text = shown(sample, hf_checkpoint=tokenizer, tokens=True)
    lines = [line.split() for line in text.split("tokens        id")[1].splitlines()]
    assert lines[0] == ["engine", "teacher"] and lines[1] == ["┆", "0", "114", '"r"']
    assert lines[-2:] == [["│", "6", "97", "-0.2500", "-1.5000", '"a"'], ["┆", "7", "10", "0.0000", "-2.0000", '"\\n"']]
    assert len(lines) == 1 + 8
    assert "┆      7      10" in shown(sample, tokens=True)


def test_no_text_moves_the_cursor_or_forges_a_line(shown, tokenizer):
    attacks = dict(label=ATTACK, metadata={ATTACK: ATTACK})
    sample = answer(0, ATTACK, loss_mask=[1] * 4 + [0] * (len(ATTACK.encode()) - 4), **attacks)
    sample.prompt = ATTACK
    other = answer(1, ATTACK, **attacks)
    other.prompt = [{"role": "user", "content": ATTACK}]
    text = shown(sample, other, hf_checkpoint=tokenizer, evaluation="x" + ATTACK.replace("\n", ""), tokens=True)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066]", text)
    assert text.count("\n┆ | forged") == 4 and text.count("\n│ | forged") == 1 and "\n| forged" not in text
    assert "[bold]x[/bold] :smile:" in text and r"\x1b[2J\x1b]0;title\x07\r\x9b31m" in text


def test_long_lines_are_wrapped_behind_their_bar(monkeypatch):
    block = module.Block("│ ", escaped("word " * 30 + "\n" + "x" * 50))
    lines = [line.plain for line in module._lines(block, Console(), 40)]
    assert len(lines) == 7 and all(line.startswith("│ ") and len(line.rstrip()) <= 40 for line in lines)
    assert len(list(module._lines(block, Console(), None))) == 2


def test_which_and_in_which_order(shown):
    samples = [answer(i, "x", group=i // 2, reward=reward) for i, reward in enumerate([0.5, None, -1.0, 2.0])]

    def indices(**options):
        return [int(index) for index in re.findall(r"^sample (\d+)", shown(*samples, **options), re.MULTILINE)]

    assert indices() == [0, 1, 2, 3]
    assert indices(sort="reward") == [3, 0, 2, 1]
    assert indices(group=1) == [2, 3] and indices(index=1) == [1]
    assert indices(limit=1, sort="reward") == [3]
    assert shown(*samples, limit=1).endswith("\n3 more; --limit 4 shows all\n")


def test_mistakes(shown, tmp_path):
    with pytest.raises(ValueError, match="7.jsonl has no such sample among its 1 of 1 group"):
        shown(answer(0, "x"), index=1)
    with pytest.raises(ValueError, match="--limit 0: at least 1"):
        shown(answer(0, "x"), limit=0)
    with pytest.raises(ValueError, match="none.jsonl is no file here"):
        show_samples(tmp_path / "none.jsonl")


@pytest.mark.real
def test_command_line(tmp_path):
    path = save_samples(str(tmp_path / "{rollout_id}.jsonl.gz"), 0, [[answer(0, "21")]])
    command = [sys.executable, "-m", "miles.tools.show_samples", str(path), "--index"]
    done = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("response\n│ 21\n")
    failed = subprocess.run([*command, "3"], capture_output=True, text=True, timeout=300)
    assert failed.returncode == 1 and failed.stderr.startswith("error: ") and not failed.stdout
