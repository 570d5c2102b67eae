"""`train_async.py` is `train.py` with another default."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = """--device cpu --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --hf-checkpoint model --prompt-data train.jsonl
--label-key label --rm-type exact --num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4
--rollout-max-response-len 16 --use-tis --print-config"""


@pytest.mark.parametrize(
    ("program", "more", "ahead", "fully"),
    [
        ("train.py", "", "False", "False"),
        ("train_async.py", "", "True", "False"),
        ("train_async.py", "--no-one-step-ahead", "False", "False"),
        ("train_async.py", "--fully-async", "False", "True"),
        ("train_async.py", "--rollout-function-path fully_async_rollout.generate_rollout_fully_async", "False", "True"),
    ],
)
def test_which_schedule(program, more, ahead, fully, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (tmp_path / "train.jsonl").touch()
    command = [sys.executable, str(ROOT / program), *FLAGS.split(), *more.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values = dict(line.split()[:2] for line in done.stdout.splitlines() if line.startswith("  "))
    assert (values["one_step_ahead"], values["fully_async"]) == (ahead, fully)
