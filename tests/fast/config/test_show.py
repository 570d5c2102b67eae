"""Help, the printed configuration, the page of flags, and what parse_args does with them."""

import subprocess
import sys
from pathlib import Path

import pytest

from miles.config import RunConfig, docs
from miles.config.names import flag_of
from miles.utils.arguments import parse_args

ROOT = Path(__file__).parents[3]


def exit_status(argv):
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    return caught.value.code


def test_help_has_every_flag(capsys):
    assert exit_status(["--help", "--nonsense"]) == 0
    shown = capsys.readouterr().out
    flags = {word.strip(",") for line in shown.splitlines() if line.startswith("  --") for word in line.split()}
    assert {flag_of(name) for name in RunConfig.model_fields if name != "sglang"} <= flags
    assert {"--sglang-NAME", "--config", "--print-config", "--no-colocate", "--load-optim"} <= flags
    assert "Prompts of one rollout. [required]" in shown


def test_every_field_is_described():
    assert all(info.description and info.description.strip() for info in RunConfig.model_fields.values())


def test_the_page_of_flags_is_current():
    written = (ROOT / "docs" / "user-guide" / "launch-flags.md").read_text(encoding="utf-8")
    assert written == docs.page(), "run `python -m miles.config.docs > docs/user-guide/launch-flags.md`"


def test_print_config(argv, capsys):
    assert exit_status(argv("--print-config --sglang-mem-fraction-static 0.3 --sglang-api-key hush")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert rows["seed"] == ["1234", "default"]
    assert rows["num_rollout"] == ["3", "command line"]
    assert rows["rollout_num_gpus"] == ["4", "derived: --colocate: the engines use the trainer's GPUs"]
    assert rows["save"] == ["unset", "default"]
    assert rows["sglang_mem_fraction_static"] == ["0.3", "command line"]
    assert rows["sglang_api_key"] == ["***", "command line"]


def test_help_and_values_agree_about_offload(argv, capsys):
    assert exit_status(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Turns both offloads on where they are not negated" in shown
    assert "fit side by side, --no-offload-train --no-offload-rollout is faster" in shown
    assert "[kv_cache weight]" in shown
    assert exit_status(argv("--print-config", no_offload_rollout=None)) == 0
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["offload_train"] == ["False", "command line"]
    assert rows["offload_rollout"] == ["True", "derived: --colocate"]


def test_problems_are_numbered_and_the_status_is_2(argv, capsys):
    assert exit_status(argv("--sead 1", num_rollout="-1")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "2 problems with the configuration:",
        "1. --sead is unknown; did you mean --seed?",
        "2. --num-rollout is '-1': input should be greater than or equal to 0",
    ]


def test_warnings_go_to_stderr(argv, capsys):
    assert parse_args(argv("--lr 0")).lr == 0
    assert capsys.readouterr().err == "warning: --lr 0: the weights will not change\n"


def test_nothing_heavy_is_imported(argv):
    script = (
        "import sys; from miles.utils.arguments import parse_args; parse_args(sys.argv[1:]); "
        "print(sorted({'torch', 'ray', 'sglang', 'megatron', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    words = argv("--sglang-mem-fraction-static 0.3")
    command, environment = [sys.executable, "-c", script, *words], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
