"""`train.py --check`: what it prints, what it advises, and how it ends."""

import json

import pytest

from miles.check.advice import changes_of_a_step, remedies
from miles.check.hardware import HARDWARE, hardware_named
from miles.check.ledger import ledger_of
from miles.utils.arguments import parse_args
from miles.utils.errors import UserError
from tests.fast.check.conftest import DENSE

H100 = HARDWARE["H100"]
LARGE = "--use-dynamic-batch-size --max-tokens-per-gpu 16384"


@pytest.fixture
def line(tmp_path):
    """A command line of one node of H100s."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE["8B"]))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "unused", "label": "unused"}\n')
    given = f"--hf-checkpoint {tmp_path} --prompt-data {prompts} --rm-type exact --label-key label --num-rollout 1 "
    given += "--rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 1792 --colocate"
    return given.split()


def ended(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        parse_args(argv)
    return end.value.code


def test_a_run_that_fits(line, capsys):
    assert ended([*line, "--check", "--check-hardware", "H200"]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("It fits.")
    assert "Qwen3ForCausalLM, 8.19 billion parameters, on H200" in shown
    assert "prompts of 1,024 tokens, for --rollout-max-prompt-len is not given" in shown
    header = next(row for row in shown.splitlines() if "engines up" in row)
    assert header.split("  ")[-1] == "   save" or header.split()[-1] == "save"
    for row in ("weights", "KV pool", "pinned: the sleeping trainer", "train", "sync"):
        assert any(one.strip().startswith(row) for one in shown.splitlines()), row


def test_a_run_that_does_not_fit(line, capsys):
    assert ended([*line, *LARGE.split(), "--check-hardware", "H100"]) == 1
    shown = capsys.readouterr().out
    assert "It does not fit\n  GPU of trainer and engine: " in shown
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in shown


def test_every_remedy_is_one(configured):
    """Each line of advice, added to the command line, gives a run that is legal and fits."""
    ways = remedies(ledger_of(configured(DENSE["8B"], LARGE), H100))
    assert ways
    for way in ways:
        again = ledger_of(configured(DENSE["8B"], f"{LARGE} {way.flags.replace('FOLDER', '.')}"), H100)
        assert (again.shortages, way.missing) == ([], 0), way
    assert [way.slower for way in ways] == sorted(way.slower for way in ways)


@pytest.mark.parametrize(("longest", "halved"), [(2048, True), (8192, False)])
def test_a_micro_batch_holds_the_longest_sample(configured, longest, halved):
    config = configured(DENSE["8B"], "--use-dynamic-batch-size --max-tokens-per-gpu 8192")
    config = config.model_copy(update={"rollout_max_response_len": longest - 256})
    assert ({"max_tokens_per_gpu": 4096} in list(changes_of_a_step(config))) == halved


def test_several_changes_together(configured):
    """32,000 tokens a micro-batch of an 8B model on one H100 need more than one change."""
    flags = "--actor-num-gpus-per-node 1 --use-dynamic-batch-size --max-tokens-per-gpu 32768"
    ledger = ledger_of(configured(DENSE["8B"], flags), H100)
    (way,) = remedies(ledger)
    assert way.flags.count("--") > 4
    assert way.missing < sum(shortage.missing for shortage in ledger.shortages) / 4


def test_a_host_that_is_too_small(configured):
    """The host's remedies spare the host."""
    from dataclasses import replace

    small = replace(HARDWARE["H200"], host_memory=200e9)
    ledger = ledger_of(configured(DENSE["8B"]), small)
    (shortage,) = ledger.shortages
    assert shortage.of_host and shortage.where == "the host of a node"
    flags = [way.flags for way in remedies(ledger)]
    assert any("--offload-train-target disk" in way for way in flags)


def test_what_is_refused(line):
    with pytest.raises(
        UserError, match="--check-hardware H400 is unknown; known: A100, H100, H200, B200, B300, GB200, GB300"
    ):
        parse_args([*line, "--check", "--check-hardware", "H400"])
    with pytest.raises(UserError, match="--device is cpu"):
        parse_args([*line, "--device", "cpu", "--check", "--check-hardware", "H200"])
    assert ended([*line, "--check", "yes"]) == 2
    assert ended([*line, "--check-hardware"]) == 2


def test_without_a_name_it_needs_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no GPU here; name the one that the run is for"):
        hardware_named(None)


@pytest.mark.parametrize(
    ("kind", "name"), [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA GB300", "GB300")]
)
def test_the_gpu_of_this_machine(monkeypatch, kind, name):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: kind)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 20))
    found = hardware_named(None)
    assert (found.name, found.memory) == (name, 20)


def test_a_gpu_that_is_not_in_the_table(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 20))
    with pytest.raises(UserError, match="does not know this machine's Some GPU"):
        hardware_named(None)
