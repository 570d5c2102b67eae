"""`python train.py` as a user starts it: real Ray, real Megatron, a real SGLang server.

The colocated runs hand the memory over in different ways, so that each way is taken with real parts: not at all, as
`--colocate` alone does it, with the peak on the GPU and the trainer on disk, and with weights rebuilt from masters.
"""

import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles.backends.sglang_utils.arguments import CPU_MAX_TOTAL_TOKENS
from miles.tracking.metrics import describe

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
# Rewards that differ within a group, so that there is something to learn.
REWARD = """
async def share_of_even_bytes(config, sample):
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in response) / len(response)
"""
# Mean difference of trainer and engine log-probabilities; measured: 4e-7. One rollout moves them by 0.4.
GAP = 1e-5
MOVES = ("sleep", "wake_up", "offload_rollout", "onload_rollout")
# Helpers of Ray's own, which notice a killed raylet only after about a minute.
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
# In bf16 each side rounds in other places; measured: 9e-3.
BF16_GAP = 0.03
COLOCATED = ("--actor-num-gpus-per-node", "1", "--colocate")
ALL_STAY = ("--no-offload-train", "--no-offload-rollout")
# Seconds. A run takes 20 to 40 on a quiet machine, and more than 120 with eight busy processes on two cores.
WAIT = 500
UNCHANGED = "tensors are bit-equal after the wake"  # what --check-residency says


class Run:
    """A `train.py` process and all that it starts, by id."""

    def __init__(self, flags, folder):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        self.log = folder.with_suffix(".log")
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = psutil.Popen(
                [sys.executable, str(ROOT / "train.py"), *flags, "--run-dir", str(folder)],
                env={**environment, "PYTHONPATH": str(folder.parent)},
                cwd=folder.parent,
                stdout=log,
                stderr=log,
            )
        self.children = set()

    @property
    def output(self):
        return self.log.read_text()

    def wait(self, text=None, timeout=WAIT):
        """Wait for the end, or until `text` is in the output; returns the exit code, or None."""
        while self.process.poll() is None and not (text and text in self.output):
            if time.monotonic() - self.started > timeout:
                pytest.fail(f"no end and no {text!r} within {timeout} s:\n{self.output[-3000:]}")
            try:
                self.children.update(self.process.children(recursive=True))
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.2)  # a look at all processes takes a tenth of that
        return self.process.returncode

    def left(self, seconds=60, but=()):
        """What still runs of the children seen, without those named in `but`, `seconds` from now at the latest."""
        deadline = time.monotonic() + seconds
        while alive := [child for child in self.children if _name(child) not in (None, *but)]:
            if time.monotonic() > deadline:
                return alive
            time.sleep(0.1)
        return []

    def end(self):
        for process in (self.process, *self.children):
            if _name(process):
                process.kill()


def _name(process):
    """Its name, or None if it has ended."""
    try:
        with process.oneshot():
            return process.name() if process.status() != psutil.STATUS_ZOMBIE and process.is_running() else None
    except psutil.NoSuchProcess:
        return None


@pytest.fixture
def train(tmp_path, tiny_checkpoint, prompt_file):
    """Starts a run of four rollouts of two steps: `train(name, *flags)`; its folder is tmp_path / name."""
    (tmp_path / "test_rewards.py").write_text(REWARD)
    runs = []

    def start(name, *flags, prompts=prompt_file, device="cpu", rollouts=4):
        base = [
            *("--device", device, "--hf-checkpoint", str(tiny_checkpoint), "--prompt-data", str(prompts)),
            *("--custom-rm-path", "test_rewards.share_of_even_bytes", "--rollout-shuffle"),
            *("--num-rollout", str(rollouts)),
            *("--rollout-batch-size", "3", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "8"),
            *("--rollout-max-context-len", "64", "--global-batch-size", "6", "--lr", "0.01"),
            *("--data-pad-size-multiplier", "8", "--rollout-engine-start-timeout", "300"),
        ]
        runs.append(Run([*base, *flags], tmp_path / name))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def steps_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_moves(steps, output, parameters):
    """Each step moved everything out and back once, reports bytes, seconds and speed of it, and the user sees them."""
    # fp32 weights are their own masters; with Adam's two moments 12 bytes a parameter. Gradients never move.
    trainer = 12 * parameters
    # SGLang rounds the 264 rows of the embedding, 64 wide, up to 320. Its pool: keys and values of two layers with two
    # heads of 16 in fp32, and a page of one token for padding.
    engine = 4 * (parameters + 56 * 64) + (CPU_MAX_TOTAL_TOKENS + 1) * 2 * 2 * 2 * 16 * 4
    for step in steps:
        # The trainer's buffers are padded.
        assert trainer <= step["perf/sleep_bytes"] == step["perf/wake_up_bytes"] <= 1.01 * trainer
        assert step["perf/offload_rollout_bytes"] == step["perf/onload_rollout_bytes"] == engine
        for name in MOVES:
            size, seconds, speed = (step[f"perf/{name}_{what}"] for what in ("bytes", "time", "gb_per_s"))
            assert seconds > 0 and speed == pytest.approx(size / 1e9 / seconds)
        assert step["perf/destroy_process_groups_time"] > 0 and step["perf/reload_process_groups_time"] > 0
        assert 0 < step["perf/cpu_memory_after_offload_train_gb"] < 10
        line = next(line for line in output.splitlines() if f"step {step['step'] + 1}/" in line)
        moves = (rf"{move} [\d.]+s \([\d.]+GB [\d.e-]+GB/s\)" for move in ("off", "wake", "sleep", "on"))
        assert re.search("{} {} train .* {} {} sync ".format(*moves), line), line


# What the engine measures varies in the last bits with the requests that share a batch; what it draws does not.
ENGINE_MEASURES = (
    "rollout/rollout_log_probs",
    "train/rollout_ess_ratio",
    *(f"train/train_rollout_{what}" for what in ("kl", "logprob_abs_diff", "ratio_max", "ratio_min")),
)


def assert_same(steps, expected):
    """The same prompts, responses, losses and gradients, to the last bit; times aside."""
    for step, reference in zip(steps, expected, strict=True):
        names = {name for name in step.keys() | reference.keys() if not name.startswith("perf/")} - {"wall_time"}
        for name in names:
            tolerance = 1e-6 if name in ENGINE_MEASURES else 0.0
            difference = abs(step[name] - reference[name])
            assert difference <= tolerance, f"step {step['step']}: {name} is {step[name]}, not {reference[name]}"


def check_steps(steps, count):
    """Whole, finite, documented, and with the same weights on both sides after every sync."""
    assert [step["step"] for step in steps] == list(range(count))
    for step in steps:
        names = step.keys() - {"step", "wall_time"}
        assert [name for name in names if describe(name) is None] == []
        assert names >= {"rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/grad_norm"}
        assert names >= {"perf/rollout_time", "perf/train_time", "perf/update_weights_time", "perf/step_time"}
        assert all(math.isfinite(step[name]) for name in names)
        assert 0 <= step["rollout/raw_reward"] <= 1 and step["rollout/response_len/max"] <= 8
        assert step["train/grad_norm"] > 1e-3
        assert step["train/train_rollout_logprob_abs_diff"] < GAP


@pytest.mark.timeout(3 * WAIT)
def test_a_run_and_the_same_with_memory_handed_over_killed_and_resumed(train, tmp_path, tiny_checkpoint):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parameters = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).num_parameters()

    def flags(name):
        return (*COLOCATED, "--save", str(tmp_path / f"{name} checkpoints"), "--save-interval", "1")

    straight = train("straight", *flags("straight"), *ALL_STAY, "--save-hf", str(tmp_path / "hf_{rollout_id}"))
    assert straight.wait() == 0, straight.output[-3000:]
    assert straight.left() == []
    steps = steps_of(tmp_path / "straight")
    check_steps(steps, 4)
    assert not any(f"perf/{name}_time" in step for name in MOVES for step in steps)
    assert all(step["perf/update_weights_bytes"] == 4 * parameters for step in steps)
    assert "step 4/4" in straight.output and "Traceback" not in straight.output
    assert list((tmp_path / "straight" / "tensorboard").iterdir())

    # A high learning rate: the weights move far, and in every step both sides still agree.
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tiny_checkpoint, tmp_path / "hf_3")
    )
    assert before.keys() == after.keys() and all(weight.isfinite().all() for weight in after.values())
    assert max((before[name] - after[name]).abs().max() for name in before) > 0.02
    assert AutoTokenizer.from_pretrained(tmp_path / "hf_3")("ab").input_ids == [97, 98]

    # Killed without a word in its third rollout, once the checkpoint of the second is complete.
    killed = train("resumed", *flags("resumed"), "--check-residency", "--no-use-tensorboard")
    assert killed.wait(text="step 2/4") is None, killed.output[-3000:]
    assert len(killed.children) > 5
    killed.process.kill()
    assert killed.wait() == -signal.SIGKILL
    assert killed.left(but=RAY_AGENTS) == []
    checkpoints = tmp_path / "resumed checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    killed_output = killed.output  # the resumed run has the same log
    assert "first_sync: engine weights returns, sync, engine kv_cache returns" in killed_output
    assert UNCHANGED in killed_output

    disk = tmp_path / "disk"
    interleaved = ("--colocate-memory-peak-device", "gpu", "--offload-train-target", "disk", "--check-residency")
    resumed = train(
        *("resumed", *flags("resumed"), "--load", str(checkpoints), "--no-use-tensorboard"),
        *(*interleaved, "--offload-train-disk-dir", str(disk)),
    )
    assert resumed.wait() == 0, resumed.output[-3000:]
    assert resumed.left() == []
    assert killed.left(60) == []
    assert "step 1/4" not in resumed.output and "step 2/4" not in resumed.output
    assert "first_sync: sync, engine kv_cache returns" in resumed.output
    assert UNCHANGED in resumed.output
    assert list(disk.iterdir()) == []
    position = "iter_0000003/data_source.json"
    assert (checkpoints / position).read_text() == (tmp_path / "straight checkpoints" / position).read_text()

    continued = steps_of(tmp_path / "resumed")
    check_steps(continued, 4)
    check_moves(continued[:2], killed_output, parameters)
    check_moves(continued[2:], resumed.output, parameters)
    # Neither the moves nor the interruption changed a bit of what was sampled and learned.
    assert_same(continued, steps)


PPO = ("--advantage-estimator", "ppo", "--num-critic-only-steps", "1", "--critic-lr", "0.003", "--lambd", "0.95")


def check_ppo_steps(steps, count, parameters=None):
    """The first step trains the critic alone. With `parameters` both models moved: each out and back once."""
    assert [step["step"] for step in steps] == list(range(count))
    for step in steps:
        names = step.keys() - {"step", "wall_time"}
        assert [name for name in names if describe(name) is None] == []
        assert all(math.isfinite(step[name]) for name in names)
        of_actor = {"train/loss", "train/grad_norm", "rollout/values", "perf/actor_train_time"}
        assert names & of_actor == (of_actor if step["step"] else set())
        assert names >= {"perf/values_time", "perf/critic_train_time", "critic-train/value_loss"}
        assert step["critic-train/grad_norm"] > 1e-3 and step["critic-train/lr-pg_0"] == 0.003
        assert step["critic-train/step"] == 2 * (step["step"] + 1)
        if step["step"]:
            assert step["train/step"] == 2 * step["step"]
            assert step["train/train_rollout_logprob_abs_diff"] < GAP
        if parameters:
            moved = (12 * parameters if step["step"] else 0) + 12 * (parameters + 65)  # a head of 64 weights and a bias
            assert moved <= step["perf/sleep_bytes"] == step["perf/wake_up_bytes"] <= 1.01 * moved
    assert steps[-1]["critic-train/value_loss"] < steps[0]["critic-train/value_loss"]


@pytest.mark.slow
def test_ppo_with_actor_critic_and_engine_in_turns(train, tmp_path, tiny_checkpoint):
    from transformers import AutoModelForCausalLM

    parameters = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).num_parameters()
    run = train("ppo", *COLOCATED, *PPO, "--check-residency", "--save", str(tmp_path / "saved"), rollouts=3)
    assert run.wait() == 0, run.output[-3000:]
    assert run.left() == []
    check_ppo_steps(steps_of(tmp_path / "ppo"), 3, parameters)
    assert "critic_built: critic comm leaves" in run.output and UNCHANGED in run.output
    for folder in ("saved", "saved_critic"):
        assert (tmp_path / folder / "latest_checkpointed_iteration.txt").read_text() == "2\n"


@pytest.mark.slow
@pytest.mark.timeout(3 * WAIT)
def test_ppo_the_same_with_memory_handed_over_killed_and_resumed(train, tmp_path):
    straight = train("straight", *COLOCATED, *PPO, *ALL_STAY)
    assert straight.wait() == 0, straight.output[-3000:]
    steps = steps_of(tmp_path / "straight")
    check_ppo_steps(steps, 4)

    # Killed once the checkpoints of both are complete.
    checkpoints = ("--save", str(tmp_path / "saved"), "--save-interval", "1", "--load", str(tmp_path / "saved"))
    killed = train("resumed", *COLOCATED, *PPO, *checkpoints, "--check-residency")
    assert killed.wait(text="step 2/4") is None, killed.output[-3000:]
    killed.process.kill()
    killed.wait()
    assert killed.left(but=RAY_AGENTS) == []
    disk = ("--offload-train-target", "disk", "--offload-train-disk-dir", str(tmp_path / "disk"))
    run = train("resumed", *COLOCATED, *PPO, *checkpoints, *disk, "--check-residency")
    assert run.wait() == 0, run.output[-3000:]
    assert "step 2/4" not in run.output and "step 3/4" in run.output
    assert_same(steps_of(tmp_path / "resumed"), steps)


@pytest.mark.slow
def test_ppo_of_two_ranks_each_beside_an_engine(train, tmp_path):
    parallel = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel")
    run = train("split", *parallel, "--rollout-num-gpus", "1", *PPO, rollouts=3)
    assert run.wait() == 0, run.output[-3000:]
    check_ppo_steps(steps_of(tmp_path / "split"), 3)


def test_two_trainer_ranks_beside_an_engine_end_on_sigterm(train, tmp_path):
    parallel = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel")
    run = train("split", *parallel, "--rollout-num-gpus", "1", rollouts=1000)
    assert run.wait(text="step 3/1000") is None, run.output[-3000:]
    assert len(run.children) > 5
    run.process.terminate()
    run.wait()
    assert run.process.returncode != 0
    assert run.left() == []
    steps = steps_of(tmp_path / "split")
    check_steps(steps, len(steps))


def test_a_gap_between_trainer_and_engine_stops_the_run(train, tmp_path):
    rebuilt = ("--bf16", "--rematerialize-param-from-master-weight", "--check-residency")
    run = train("tight", *COLOCATED, *rebuilt, "--max-logprob-abs-diff", "1e-12", "--no-use-tensorboard")
    assert run.wait() == 1
    sentence = "after the first weight sync the trainer's and the engine's log-probabilities of rollout 0 differ by "
    assert sentence in run.output
    assert "the bound is 1e-12 (--max-logprob-abs-diff)" in run.output
    # The weights were dropped, and both sides got them from the masters.
    assert 0 < float(run.output.split(sentence)[1].split()[0]) < BF16_GAP
    # The screen has the sentence alone, and the file where it came from, in the process of a rank too.
    log = (tmp_path / "tight" / "error.log").read_text()
    assert f"error: {sentence}" in run.output and "Traceback" not in run.output
    assert run.output.rstrip().endswith(str(tmp_path / "tight" / "error.log"))
    assert sentence in log and "in check_log_probs" in log and "train.py --device cpu" in log and "\x1b" not in log
    assert run.left() == []


BAD_ROWS = '{"input": "a", "label": "1"}\n{"input": "b"\n{"input": "c"}\n'


def test_bad_prompts_are_refused_before_an_engine_starts(train, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(BAD_ROWS)
    run = train("bad", *COLOCATED, "--label-key", "label", prompts=path)
    assert run.wait() == 1
    assert f"{path}:2" in run.output and f"{path}:3" in run.output and "label" in run.output
    assert "Traceback" not in run.output
    assert not (tmp_path / "bad" / "logs").exists()
    assert run.left() == []


REFUSED = {
    "unknown flag": ((*COLOCATED, "--learning-rate", "1"), 2, "--learning-rate is unknown"),
    "missing label key": (
        (*COLOCATED, "--rm-type", "exact"),
        2,
        "--rm-type exact needs --label-key, the column with the right answer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_command_line_is_refused_at_once(train, tmp_path, name):
    flags, code, sentence = REFUSED[name]
    run = train("refused", *flags)
    assert run.wait() == code
    assert sentence in run.output and "Traceback" not in run.output
    assert not (tmp_path / "refused").exists()


def test_too_few_devices_are_named(train):
    run = train("crowd", *COLOCATED, device="cuda")
    assert run.wait() == 1
    assert "the Ray cluster has 0" in run.output and "run with --device cpu" in run.output
    assert "Traceback" not in run.output
    assert run.left() == []
