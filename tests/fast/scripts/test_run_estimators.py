"""scripts/run_estimators.py: its settings are right for train.py, and its table says what the metrics say."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from miles.training.advantages import ESTIMATORS
from miles.utils.arguments import parse_args

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts/run_estimators.py"))


def test_settings_are_of_estimators():
    assert set(SCRIPT["SETTINGS"]) < set(ESTIMATORS)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_command_line_is_accepted(estimator, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = []
    train = SCRIPT["train"]
    monkeypatch.setitem(train.__globals__, "run", lambda *command: commands.append(command))
    folder = tmp_path / "estimators"
    folder.mkdir()
    (folder / "warm").symlink_to(tiny_checkpoint)
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").touch()
    monkeypatch.setitem(train.__globals__, "FOLDER", folder)
    train(estimator)
    ((program, *words),) = commands
    config = parse_args(words)
    assert program == "train.py" and config.advantage_estimator == estimator
    assert (config.num_rollout, config.eval_interval) == (24, 24)


def run_of(rewards, seconds=2.0):
    steps = [{"step": i, "rollout/raw_reward": reward, "perf/step_time": seconds} for i, reward in enumerate(rewards)]
    steps[0]["eval/reverse"], steps[-1]["eval/reverse"] = 0.25, 0.75
    return steps


def test_the_table(tmp_path, monkeypatch, capsys):
    rewards = [0.1, 0.2, 0.3, *[0.5] * 18, 0.7, 0.8, 0.9]
    folder = tmp_path / "estimators"
    for name, steps in {"grpo": run_of(rewards), "ppo": run_of(rewards[:5])}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    main = SCRIPT["main"]
    monkeypatch.setitem(main.__globals__, "FOLDER", folder)
    monkeypatch.setattr(sys, "argv", ["run_estimators.py", "--table", "--output", str(tmp_path / "a.svg")])
    main()
    out, err = capsys.readouterr()
    assert "| grpo | 0.200 | 0.800 | 0.250 | 0.750 | 48s |  |" in out
    assert "ppo is left out: 5 of 24 rollouts are done" in err
    assert ">grpo<" in (tmp_path / "a.svg").read_text()


def test_unknown_estimators_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_estimators.py", "grop"])
    with pytest.raises(SystemExit):
        SCRIPT["main"]()
    assert "unknown: grop; known are grpo, gspo" in capsys.readouterr().err
