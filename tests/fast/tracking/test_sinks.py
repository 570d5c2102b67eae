"""Every tracker is told what TensorBoard is told, number by number; what fails is left out; no key is written."""

import json
import logging
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.config.resolve import resolve
from miles.tracking import sinks as sinks_module
from miles.tracking.report import Report
from miles.tracking.sinks import RUN_IDS, Sinks, trackers
from miles.utils.errors import UserError

KEY = "0123456789abcdef0123456789abcdef01234567"
STEPS = [
    {"train/loss": 0.25, "train/step": 4.0, "rollout/raw_reward": 1 / 3, "critic-train/value_loss": 7.0},
    {"train/loss": -1.5, "train/step": 8.0, "rollout/raw_reward": math.nan, "eval/held-out": 0.5, "perf/x_bytes": 3e12},
]


def config_of(folder, *more):
    """A configuration whose run is in `folder`/run, with a key and a password where keys are given."""
    shape = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}
    shape["num_hidden_layers"] = 4
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "prompts.jsonl").write_text('{"input": "a", "label": "b"}\n')
    flags = "--device cpu --actor-num-gpus-per-node 1 --colocate --no-offload-train --no-offload-rollout"
    flags += " --num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 2 --rollout-max-response-len 8"
    flags += f" --rm-type remote_rm --rm-url http://me:{KEY}@host/score --sglang-api-key {KEY} --label-key label"
    files = ["--hf-checkpoint", str(folder), "--prompt-data", str(folder / "prompts.jsonl")]
    return resolve([*flags.split(), *files, "--run-dir", str(folder / "run"), *more]).config


def start(folder, *arguments, **environment):
    """`main` in a process of its own, for W&B and trackio keep a state in theirs; what it printed."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    command = [sys.executable, __file__, str(folder), *arguments]
    return subprocess.run(
        command, env=unset | environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )


def main(folder, first, fails, *more):
    """Reports both steps of a run from step `first` on, and then fails or not."""
    config = config_of(Path(folder), *more)
    with trackers(config) as sinks:
        report = Report(config.model_copy(update={"num_rollout": 9}), int(first), sinks)
        for step, metrics in enumerate(STEPS, int(first)):
            report.step(step, metrics)
        if fails == "fails":
            raise KeyError("on purpose")


ALL = [
    "--use-wandb",
    "--wandb-mode",
    "offline",
    "--wandb-project",
    "sums",
    "--wandb-group",
    "gold",
    "--wandb-team",
    "us",
]
ALL += ["--wandb-key", KEY, "--use-mlflow", "--mlflow-experiment-name", "sums", "--use-trackio"]
ALL += ["--trackio-project", "sums"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The folder of a run that told every tracker of two steps."""
    folder = tmp_path_factory.mktemp("logged")
    done = start(folder, "0", "ends", *ALL, WANDB_API_KEY=KEY, SOME_TOKEN=KEY)
    assert done.returncode == 0 and KEY not in done.stdout + done.stderr, done.stderr
    return folder / "run"


def in_tensorboard(run):
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {(name, event.step): event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)}


def same(numbers, others):
    """Equal within what TensorBoard keeps, which is float32."""
    assert numbers.keys() == others.keys() and len(numbers) > 8
    for key, number in numbers.items():
        assert number == pytest.approx(others[key], rel=1e-6, nan_ok=True), key


def records_of(file):
    """What a file of an offline run of W&B holds: blocks of 32 KiB, of parts that each have 7 bytes of header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, record = file.read_bytes(), 7, b""
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def rows_in_wandb(run):
    """By run id, a dict for each row that was logged; and the records themselves."""
    rows, records = {}, []
    for file in sorted(run.rglob("*.wandb")):
        found = list(records_of(file))
        (run_id,) = {record.run.run_id for record in found if record.WhichOneof("record_type") == "run"}
        for record in found:
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                rows.setdefault(run_id, []).append(items)
        records += found
    return rows, records


def in_wandb(rows):
    return {
        (name, row["rollout/step"]): float(value)
        for row in rows
        for name, value in row.items()
        if not name.startswith("_") and name not in ("rollout/step", "eval/step")
    }


def test_wandb(logged):
    rows, records = rows_in_wandb(logged)
    ((run_id, rows),) = rows.items()
    same(in_wandb(rows), in_tensorboard(logged))
    assert [(row["rollout/step"], row["eval/step"], row["train/step"]) for row in rows] == [(0, 0, 4), (1, 1, 8)]
    axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["train/*"] == axes["critic-train/*"] == "train/step" and axes["eval/*"] == "eval/step"
    assert axes["rollout/*"] == axes["perf/*"] == "rollout/step"
    (about,) = [r.run for r in records if r.HasField("run")]
    assert (about.project, about.run_group, about.entity) == ("sums", "gold", "us")
    assert about.display_name == f"gold_{run_id}"
    settings = {update.key: json.loads(update.value_json) for update in about.config.update}
    assert settings["rollout_batch_size"] == 1 and settings["rm_url"] == "http://***@host/score"
    assert "wandb_key" not in settings and "api_key" not in settings["sglang"]


def test_mlflow(logged):
    same(in_mlflow(logged), in_tensorboard(logged))
    with sqlite3.connect(logged / "mlflow.db") as database:
        assert database.execute("select name, status from runs").fetchall() == [("gold", "FINISHED")]
        assert ("sums",) in database.execute("select name from experiments").fetchall()
        params = dict(database.execute("select key, value from params").fetchall())
    assert params["rollout_batch_size"] == "1" and params["rm_url"] == "http://***@host/score"


def in_mlflow(run):
    with sqlite3.connect(run / "mlflow.db") as database:
        rows = database.execute("select key, step, value, is_nan from metrics").fetchall()
    return {(name, step): math.nan if nan else value for name, step, value, nan in rows}


def test_trackio(logged):
    same(in_trackio(logged), in_tensorboard(logged))


def in_trackio(run):
    with sqlite3.connect(run / "trackio" / "sums.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert {name for name, _, _ in rows} == {"run"}
    return {(name, step): float(value) for _, step, text in rows for name, value in json.loads(text).items()}


def test_no_key_is_written(logged):
    files = [file for file in logged.rglob("*") if file.is_file()]
    assert {".wandb", ".db"} <= {file.suffix for file in files}
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


def test_a_resumed_run_goes_on_with_the_run_of_each_tracker(logged, tmp_path):
    folder = shutil.copytree(logged.parent, tmp_path / "resumed", symlinks=True)
    run = folder / "run"
    ids = json.loads((run / RUN_IDS).read_text())
    name = ("--disable-wandb-random-suffix",)
    done = start(folder, "2", "fails", *ALL, *name, "--load", str(tmp_path / "checkpoints"), WANDB_API_KEY=KEY)
    assert "KeyError: 'on purpose'" in done.stderr
    rows, records = rows_in_wandb(run)
    assert list(rows) == [ids["wandb"]] and [row["rollout/step"] for row in rows[ids["wandb"]]] == [0, 1, 2, 3]
    assert [r.run.display_name for r in records if r.HasField("run")][1] == "gold"
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0, 1]
    assert {step for _, step in in_mlflow(run)} == {step for _, step in in_trackio(run)} == {0, 1, 2, 3}
    with sqlite3.connect(run / "mlflow.db") as database:
        assert database.execute("select status from runs").fetchall() == [("FAILED",)]
    assert json.loads((run / RUN_IDS).read_text()) == ids


class Tracker:
    """One whose server goes away after a number of writes."""

    errors = (OSError,)

    def __init__(self, writes=9, run_id="new"):
        self.left, self.seen, self.closed, self.run_id = writes, [], None, run_id

    def write(self, step, values):
        if not self.left:
            raise OSError("no route to host")
        self.left -= 1
        self.seen.append(step)

    def close(self, *, failed):
        self.closed = failed


@pytest.mark.parametrize("more, run_id", [((), "new"), (("--load", "checkpoints"), "old")])
def test_only_a_resumed_run_takes_the_run_that_is_there(tmp_path, monkeypatch, more, run_id):
    config = config_of(tmp_path, *more)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_IDS).write_text('{"one": "old"}')
    begin = {"one": lambda config, folder, run_id: Tracker(run_id=run_id or "new")}
    monkeypatch.setattr(sinks_module, "_starts", lambda config: begin)
    with trackers(config):
        assert json.loads((tmp_path / "run" / RUN_IDS).read_text()) == {"one": run_id}


def test_a_tracker_that_fails_is_told_no_more_and_the_others_are(caplog):
    broken, sound, sinks = Tracker(1), Tracker(), Sinks()
    sinks.add("broken", broken)
    sinks.add("sound", sound)
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            sinks.write(step, {"a": 1.0})
        sinks.close(failed=False)
    assert broken.seen == [0] and sound.seen == [0, 1, 2] and (broken.closed, sound.closed) == (None, False)
    said = "broken failed at step 1, and is told no more: OSError: no route to host"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_without_a_key_wandb_ends_the_run_before_it_starts(tmp_path):
    flags = ("0", "ends", "--use-wandb", "--wandb-host", "http://127.0.0.1:1")
    done = start(tmp_path, *flags, NETRC=str(tmp_path / "none"), HOME=str(tmp_path))
    assert done.returncode == 1 and "UserError: --use-wandb: " in done.stderr and "WANDB_API_KEY" in done.stderr


@pytest.mark.parametrize(
    "tracker, packages",
    [("wandb", "wandb"), ("mlflow", "mlflow-skinny sqlalchemy alembic"), ("trackio", "trackio")],
)
def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch, tracker, packages):
    monkeypatch.setattr(sinks_module.importlib.util, "find_spec", lambda name: None)
    said = f"--use-{tracker} needs a package that is not installed: pip install {packages}$"
    with pytest.raises(UserError, match=said), trackers(config_of(tmp_path, f"--use-{tracker}")):
        pytest.fail("it began")


if __name__ == "__main__":
    main(*sys.argv[1:])
