import json
import logging
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.tracking import report as report_module
from miles.tracking.report import Report, duration, number, read_metrics
from miles.tracking.sinks import Sinks
from miles.utils.arguments import parse_args

STEP = {
    "rollout/raw_reward": 0.53,
    "rollout/response_len/mean": 5.9,
    "train/loss": 0.0123,
    "train/train_rollout_kl": 1.2e-4,
    "train/grad_norm": 2.31,
    "perf/rollout_time": 1.1,
    "perf/train_time": 0.9,
    "perf/update_weights_time": 0.1,
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until the test moves it."""
    now = [100.0]
    monkeypatch.setattr(report_module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def make_report(tmp_path):
    """Makes the report of a run in tmp_path/run, without TensorBoard."""
    shape = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}
    shape["num_hidden_layers"] = 4
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "prompts.jsonl").write_text('{"input": "a", "label": "b"}\n')
    flags = "--device cpu --actor-num-gpus-per-node 1 --colocate --no-offload-train --no-offload-rollout"
    flags += " --num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 2 --rollout-max-response-len 8"
    flags += " --rm-type exact --label-key label --eval-interval 2 --no-use-tensorboard"
    prompts = str(tmp_path / "prompts.jsonl")
    files = ["--hf-checkpoint", str(tmp_path), "--prompt-data", prompts, "--eval-prompt-data", "demo", prompts]
    config = parse_args([*flags.split(), *files, "--run-dir", str(tmp_path / "run")])

    def make(num_rollout, start=0, sinks=None, **changes):
        return Report(config.model_copy(update={"num_rollout": num_rollout} | changes), start, sinks or Sinks())

    return make


def lines_of(report):
    return [json.loads(line) for line in report.path.read_text().splitlines()]


def test_step_line(make_report, clock, capsys):
    report = make_report(60, 11)
    clock[0] += 2.2
    report.step(11, STEP)
    assert capsys.readouterr().out == (
        "step 12/60  reward 0.53  len 5.9  loss 0.0123  kl(engine) 1.2e-4  grad 2.31"
        "  | generate 1.1s train 0.9s sync 0.10s | 2.2s/step  eta 1m46s\n"
    )


def test_moves_show_their_bytes_and_speed(make_report, clock, capsys):
    report = make_report(60, 11)
    clock[0] += 3
    moves = {
        "perf/sleep_time": 0.16,
        "perf/sleep_bytes": 8.3e9,
        "perf/sleep_gb_per_s": 51.9,
        "perf/wake_up_time": 24.04,
        "perf/wake_up_bytes": 120e9,
        "perf/wake_up_gb_per_s": 4.99,
        "perf/offload_rollout_time": 0.02,
        "perf/offload_rollout_bytes": 0.0,
        "perf/offload_rollout_gb_per_s": 0.0,
        "perf/onload_rollout_time": 0.05,
        "perf/onload_rollout_bytes": 0.27e9,
        "perf/update_weights_bytes": 200e3,
        "perf/update_weights_gb_per_s": 0.002,
        "perf/clear_memory_time": 0.01,
        "perf/cpu_memory_after_offload_train_gb": 9.0,
    }
    report.step(11, {name: value for name, value in STEP.items() if name.startswith("perf")} | moves)
    assert capsys.readouterr().out == (
        "step 12/60  | generate 1.1s off 0.02s wake 24.0s (120GB 5GB/s) train 0.9s sleep 0.16s (8.3GB 52GB/s)"
        " on 0.05s (0.27GB) sync 0.10s | 3.0s/step  eta 2m24s\n"
    )


def test_a_step_shows_what_it_has(make_report, clock, capsys):
    report = make_report(2)
    clock[0] += 1
    report.step(0, {"rollout/raw_reward": 1.0, "eval/a-b": 0.25, "eval/a-b-truncated_ratio": 0.5})
    assert capsys.readouterr().out == "step 1/2  reward 1  eval/a-b 0.25 | 1.0s/step  eta 1.0s\n"


def test_metrics_file(make_report, clock):
    report = make_report(2)
    clock[0] += 2
    report.step(0, STEP)
    (line,) = lines_of(report)
    assert line.pop("step") == 0 and line.pop("wall_time") > 1e9
    assert line == STEP | {"perf/step_time": 2.0}


def test_timers_count_for_the_step_that_is_reported_next(make_report, clock, capsys):
    report = make_report(2)
    for seconds in (1.5, 0.5):
        with report.timer("sync"):
            clock[0] += seconds
    report.step(0, {})
    report.step(1, {})
    first, second = lines_of(report)
    assert first["perf/update_weights_time"] == 2.0 and "perf/update_weights_time" not in second
    assert "| sync 2.0s |" in capsys.readouterr().out


def test_what_is_not_finite_becomes_null(make_report, caplog):
    report = make_report(1)
    with caplog.at_level(logging.WARNING):
        report.step(0, STEP | {"train/loss": math.nan, "train/grad_norm": math.inf})
    (line,) = lines_of(report)
    assert line["train/loss"] is None and line["train/grad_norm"] is None and line["rollout/raw_reward"] == 0.53
    assert "train/loss = nan" in caplog.text and "train/grad_norm = inf" in caplog.text


def test_steps_come_in_order(make_report):
    report = make_report(3)
    report.step(0, STEP)
    with pytest.raises(AssertionError, match="1 is next"):
        report.step(0, STEP)


def test_a_resumed_run_writes_no_step_twice(make_report, caplog):
    first = make_report(5)
    for step in range(4):
        first.step(step, STEP)
    resumed = make_report(5, 2)
    assert "2 lines of steps from 2 on are dropped" in caplog.text
    for step in range(2, 5):
        resumed.step(step, STEP | {"rollout/raw_reward": 0.9})
    lines = lines_of(resumed)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["rollout/raw_reward"] for line in lines] == [0.53, 0.53, 0.9, 0.9, 0.9]


def test_a_line_cut_off_by_a_kill_is_dropped(make_report, caplog):
    killed = make_report(5)
    killed.step(0, STEP)
    with killed.path.open("a") as file:
        file.write('{"step": 1, "rollou')
    resumed = make_report(5, 1)
    resumed.step(1, STEP)
    assert [line["step"] for line in lines_of(resumed)] == [0, 1]
    assert "cut off" in caplog.text


@pytest.mark.parametrize("line, words", [("{]", "line 1: not JSON"), ("[1]", "1: no object"), ("{}", "1: no object")])
def test_a_broken_file_is_refused(make_report, line, words):
    make_report(5).path.write_text(line + "\n")
    with pytest.raises(ValueError, match=words):
        make_report(5)


def test_the_evaluation_of_the_runs_start_is_printed_at_once_and_written_with_the_first_step(make_report, capsys):
    report = make_report(3)
    report.before_training({"eval/demo": 0.1})
    assert capsys.readouterr().out == "before training  eval/demo 0.1\n"
    for step in range(2):
        report.step(step, STEP)
    assert [line.get("eval/demo") for line in lines_of(report)] == [0.1, None]


def test_two_evaluations_of_the_first_step_are_both_written(make_report):
    report = make_report(2)
    report.before_training({"eval/demo": 0.1})
    for step, value in enumerate((0.2, 0.3)):
        report.add({"eval/demo": value})
        report.step(step, STEP)
    evaluations = [{k: v for k, v in line.items() if k.startswith("eval/")} for line in lines_of(report)]
    assert evaluations == [{"eval/demo": 0.2, "eval/demo-before_train": 0.1}, {"eval/demo": 0.3}]


@pytest.mark.parametrize("start, step", [(0, 0), (5, 4)])
def test_an_evaluation_alone_is_a_whole_run(make_report, clock, capsys, start, step):
    """It is that of the step whose weights it has; what was written before it stays."""
    first = make_report(6)
    for done in range(6):
        first.step(done, STEP)
    with first.path.open("a") as file:
        file.write('{"step": 6, "rollou')  # killed in the middle of a line
    capsys.readouterr()
    report = make_report(0, start, eval_interval=None)
    with report.timer("eval"):
        clock[0] += 3
    report.evaluation(step, {"eval/demo": 0.25})
    assert capsys.readouterr().out == "evaluation  eval/demo 0.25\n"
    *before, line = lines_of(report)
    assert [line["step"] for line in before] == list(range(6))
    assert line.pop("wall_time") > 0
    assert line == {"step": step, "eval/demo": 0.25, "perf/eval_time": 3.0, "perf/step_time": 3.0}
    report.path.write_text(json.dumps(line) + "\n")
    assert report.summary().splitlines() == [
        "1 step          first     last     best",
        f"eval/demo       0.250    0.250    0.250  (best at step {step + 1}; 1 values)",
        "time 3.0s: eval 3.0s (100%)",
    ]


def test_the_wait_for_a_batch_stands_for_its_generation(make_report, clock, capsys):
    report = make_report(1)
    with report.timer("wait"):
        clock[0] += 0.5
    clock[0] += 2
    report.step(0, {"perf/rollout_time": 1.5, "perf/train_time": 1.5})
    assert capsys.readouterr().out == "step 1/1  | wait 0.5s train 1.5s | 2.5s/step  eta 0.0s\n"
    assert lines_of(report)[0]["perf/rollout_time"] == 1.5
    assert report.summary().splitlines()[-1] == "time 2.5s: wait 0.5s (20%), train 1.5s (60%), other 0.5s (20%)"


def test_the_first_step_does_not_pay_for_what_came_before(make_report, clock):
    report = make_report(2)
    clock[0] += 50
    report.begin()
    clock[0] += 2
    report.step(0, STEP)
    assert lines_of(report)[0]["perf/step_time"] == 2.0


def test_tensorboard_has_every_scalar(make_report):
    report = make_report(3, use_tensorboard=True)
    report.step(0, STEP)
    report.step(1, STEP | {"train/loss": 0.5})
    report.summary()
    events = EventAccumulator(str(report.path.parent / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(STEP) | {"perf/step_time"}
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(0, pytest.approx(0.0123)), (1, 0.5)]


def test_summary(make_report, clock, capsys):
    report = make_report(3)
    for step, (reward, evaluation) in enumerate([(0.2, 0.1), (0.8, None), (0.6, 0.7)]):
        clock[0] += 5
        report.step(step, STEP | {"rollout/raw_reward": reward} | ({"eval/demo": evaluation} if evaluation else {}))
    capsys.readouterr()
    assert (
        report.summary() + "\n"
        == capsys.readouterr().out
        == (
            "3 steps         first     last     best\n"
            "reward          0.200    0.600    0.800  (best at step 2; 3 values)\n"
            "eval/demo       0.100    0.700    0.700  (best at step 3; 2 values)\n"
            "time 15s: generate 3.3s (22%), train 2.7s (18%), sync 0.3s (2%), other 8.7s (58%)\n"
        )
    )


def test_summary_counts_moves_apart(make_report, clock):
    report = make_report(1)
    clock[0] += 5
    moves = {"perf/sleep_time": 0.4, "perf/wake_up_time": 0.3, "perf/offload_rollout_time": 0.2}
    # These are parts of other times, and bytes are no time.
    parts = {"perf/destroy_process_groups_time": 0.1, "perf/actor_train_time": 0.8, "perf/sleep_bytes": 1e9}
    report.step(0, STEP | moves | parts)
    assert report.summary().splitlines()[-1] == (
        "time 5.0s: generate 1.1s (22%), off 0.2s (4%), wake 0.3s (6%), train 0.9s (18%), sleep 0.4s (8%), "
        "sync 0.1s (2%), other 2.0s (40%)"
    )


def test_summary_without_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert report_module.summarise(read_metrics(tmp_path / "metrics.jsonl")) == "no step was finished"


def test_numbers_and_durations():
    values = [0.53, 0.0, 1.2e-4, -3.0e-10, 12345.6, 2.31, 1e7, math.nan]
    assert [number(value) for value in values] == ["0.53", "0", "1.2e-4", "-3.0e-10", "12346", "2.31", "1e+07", "nan"]
    seconds = [0.44, 9.96, 59.6, 105, 7380]
    assert [duration(value) for value in seconds] == ["0.4s", "10s", "1m00s", "1m45s", "2h03m"]
