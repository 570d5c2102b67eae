"""`python train.py` in each schedule, with real parts: each prompt is trained on once, through a kill and a resume."""

import itertools
import json
import signal

import psutil
import pytest

from miles.rollout.sample_io import load_samples
from miles.tracking.metrics import describe
from tests.fast.test_train import RAY_AGENTS, assert_same, steps_of, train

pytestmark = pytest.mark.real

__all__ = ["train"]  # a fixture

SPLIT = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--num-gpus-per-node", "2")
SAMPLES = "rollout_{rollout_id}.jsonl"
GROUPS, MEMBERS = 3, 4  # of a rollout; samples of a group


def flags_of(folder, *more):
    """Of a run that saves after each rollout, and writes down what it trains on."""
    saved = ("--save", str(folder / "checkpoints"), "--save-interval", "1", "--no-use-tensorboard")
    return (*SPLIT, *more, *saved, "--save-debug-rollout-data", str(folder / SAMPLES))


def trained_on(folder, rollouts):
    """The indices of the groups of each rollout, all members there."""
    indices = []
    for rollout_id in range(rollouts):
        groups = load_samples(str(folder / SAMPLES), rollout_id)
        assert [len(group) for group in groups] == [MEMBERS] * GROUPS
        indices.append([group[0].group_index for group in groups])
    return indices


def versions_of(folder, rollout_id):
    """Of the weights that wrote it."""
    samples = itertools.chain.from_iterable(load_samples(str(folder / SAMPLES), rollout_id))
    return {version for sample in samples for version in sample.weight_versions}


def waiting(folder, rollout_id):
    """The groups that the checkpoint of `rollout_id` keeps for later."""
    state = json.loads((folder / f"checkpoints/iter_{rollout_id:07d}" / "samples.json").read_text())["collector"]
    return [group[0]["group_index"] for group in state["finished"] + state["unfinished"]]


def handed_out(folder, rollout_id):
    """How many groups the prompts had given by then."""
    return json.loads((folder / f"checkpoints/iter_{rollout_id:07d}" / "data_source.json").read_text())["group_index"]


def check_conservation(folder, rollouts):
    """Every prompt that was handed out is in one rollout, or waits in the last checkpoint."""
    used = [index for indices in trained_on(folder, rollouts) for index in indices]
    assert sorted(used + waiting(folder, rollouts - 1)) == list(range(handed_out(folder, rollouts - 1)))


def check_steps(steps, count, overlaps):
    assert [step["step"] for step in steps] == list(range(count))
    for step in steps:
        assert [name for name in step if name not in ("step", "wall_time") and describe(name) is None] == []
        assert ("perf/train_wait_time" in step) == overlaps
        assert step["perf/step_time"] > 0 and step["train/grad_norm"] > 0


def is_of_a_checkpoint(process):
    """Whether it is the queue of Megatron's checkpoint writers, which outlives a rank that is killed at work."""
    try:
        return "multiprocessing" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True


def killed_and_resumed(train, folder, rollouts, *flags):  # noqa: F811
    """A run killed once its second rollout is saved, and the run that goes on."""
    killed = train(folder.name, *flags, rollouts=rollouts)
    assert killed.wait(text="step 2/") is None, killed.output[-3000:]
    killed.process.kill()
    assert killed.wait() == -signal.SIGKILL
    last = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    resumed = train(folder.name, *flags, "--load", str(folder / "checkpoints"), rollouts=rollouts)
    assert resumed.wait() == 0, resumed.output[-3000:]
    left = [child for child in killed.left(2, RAY_AGENTS) if not is_of_a_checkpoint(child)]
    assert left == [] and resumed.left() == []
    assert f"step {last + 2}/" in resumed.output and f"step {last + 1}/" not in resumed.output
    return resumed


SCHEDULES = {
    "in_turns": (),
    "ahead": ("--one-step-ahead",),
    "ahead_refilled": ("--one-step-ahead", "--over-sampling-batch-size", "5", "--partial-rollout"),
    "async": ("--fully-async", "--partial-rollout", "--max-weight-staleness", "2"),
    "async_anew": ("--fully-async", "--async-max-concurrent-samples", "8"),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_lost_or_doubled_by_a_kill_and_a_resume(train, tmp_path, name):  # noqa: F811
    rollouts, schedule = 4, SCHEDULES[name]
    folder = tmp_path / "resumed"
    folder.mkdir()
    killed_and_resumed(train, folder, rollouts, *flags_of(folder, *schedule))
    check_steps(steps_of(folder), rollouts, overlaps=bool(schedule))
    check_conservation(folder, rollouts)
    if name not in ("in_turns", "ahead"):
        return  # which groups are finished first is not the same in any two runs

    straight = tmp_path / "straight"
    straight.mkdir()
    run = train("straight", *flags_of(straight, *schedule), rollouts=rollouts)
    assert run.wait() == 0, run.output[-3000:]
    expected = [list(range(GROUPS * rollout, GROUPS * (rollout + 1))) for rollout in range(rollouts)]
    assert trained_on(straight, rollouts) == trained_on(folder, rollouts) == expected
    if name == "in_turns":
        assert_same(steps_of(folder), steps_of(straight))
    versions = [versions_of(straight, rollout_id) for rollout_id in range(rollouts)]
    # One step ahead a rollout is written with the weights of before the last step, and all of it with the same.
    assert versions == ([{"1"}, {"1"}, {"2"}, {"3"}] if schedule else [{"1"}, {"2"}, {"3"}, {"4"}])


def test_a_fully_asynchronous_run_trains_and_evaluates(train, tmp_path, prompt_file):  # noqa: F811
    """Weights come while the engine writes; what is cut off goes on; nothing is trained on twice."""
    folder = tmp_path / "async"
    folder.mkdir()
    flags = (*SPLIT, "--fully-async", "--partial-rollout", "--no-use-tensorboard")
    evaluated = ("--eval-interval", "3", "--eval-prompt-data", "held", str(prompt_file), "--eval-temperature", "0")
    run = train("async", *flags, *evaluated, "--save-debug-rollout-data", str(folder / SAMPLES), rollouts=3)
    assert run.wait() == 0, run.output[-3000:]
    assert run.left() == []
    steps = steps_of(folder)
    check_steps(steps, 3, overlaps=True)
    assert steps[-1].keys() >= {"eval/held", "perf/eval_time"} and "eval/held" in steps[0]
    assert "| wait " in run.output and "generate " not in run.output and "before training  eval/held" in run.output
    used = [index for indices in trained_on(folder, 3) for index in indices]
    assert len(set(used)) == len(used)
    seen = [versions_of(folder, rollout_id) for rollout_id in range(3)]
    assert seen[0] == {"1"} and set.union(*seen) <= {"1", "2", "3"}
    for name in ("rollout_0.eval_held-before_train.jsonl", "rollout_2.eval_held.jsonl"):
        assert (folder / name).is_file()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_evaluation_alone_is_that_of_the_weights_that_are_loaded(train, tmp_path, prompt_file):  # noqa: F811
    colocated = ("--actor-num-gpus-per-node", "1", "--colocate", "--no-use-tensorboard")
    held_out = ("--eval-prompt-data", "held", str(prompt_file), "--eval-temperature", "0")
    saved = str(tmp_path / "saved")
    trained = train("trained", *colocated, *held_out, "--eval-interval", "2", "--save", saved, rollouts=2)
    assert trained.wait() == 0, trained.output[-3000:]
    first, last = steps_of(tmp_path / "trained")
    assert first["eval/held"] != last["eval/held"]

    cases = {"loaded": ((*colocated, "--load", saved), 1, last), "fresh": ((*SPLIT, "--debug-rollout-only"), 0, first)}
    for name, (flags, step, expected) in cases.items():
        run = train(name, *flags, *held_out, rollouts=0)
        assert run.wait() == 0, run.output[-3000:]
        assert run.left() == []
        (line,) = steps_of(tmp_path / name)
        assert line["step"] == step and line.keys() >= {"perf/eval_time", "perf/step_time"}
        names = {name for name in line if name.startswith("eval/")}
        assert {name: line[name] for name in names} == {name: expected[name] for name in names}
        assert "evaluation  eval/held" in run.output and "\n1 step " in run.output
