import gzip
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from miles.rollout.sample_io import load_samples, read_samples, samples_path, save_samples
from miles.training.batch import TrainRows
from miles.utils.types import Sample

ROOT = Path(__file__).parents[3]
# Rewards that differ within a group, so that there is something to learn.
REWARD = """
async def share_of_even_bytes(config, sample):
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in response) / len(response)
"""
TEMPLATE = "rollout_{rollout_id}.jsonl"


def group(number, *rewards, **fields):
    return [
        Sample(
            group_index=number,
            index=10 * number + place,
            prompt="rev 12",
            tokens=[1, 2, 3, 4],
            response="ab",
            response_length=2,
            reward=reward,
            **fields,
        )
        for place, reward in enumerate(rewards)
    ]


HARD = {
    "log_probs": {"rollout_log_probs": [-0.1 - 0.2, -5e-324], "teacher_log_probs": [-1e308, -0.0]},
    "mask and versions": {"loss_mask": [1, 0], "weight_versions": ["3", "4"], "weight_version_lengths": [1, 1]},
    "no mask": {"loss_mask": None, "status": Sample.Status.FAILED, "remove_sample": True, "rollout_id": 7},
    "large integers": {"metadata": {"n": 10**400 + 1, "deep": [{"x": [2**64, -(2**70)]}]}},
    "text": {"metadata": {"é": "\u2028\x00\r\n\u202e漢字 \U0001f600"}, "label": "naïve\x85"},
    "half a surrogate pair": {"label": "a\ud800b"},
    "messages": {"metadata": {"messages": [{"role": "user", "content": None}]}},
}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("fields", HARD.values(), ids=HARD)
def test_what_is_read_is_what_was_written(tmp_path, fields, ending):
    groups = [group(0, 1.0, None, **fields), group(3, 0.1)]
    groups[1][0].prompt = [{"role": "user", "content": "ü"}]
    template = str(tmp_path / "new" / "{rollout_id}") + ending
    path = save_samples(template, 12, groups, hf_checkpoint="model")
    assert path == tmp_path / "new" / f"12{ending}" and os.listdir(path.parent) == [path.name]
    assert load_samples(template, 12) == groups
    header, samples = read_samples(path)
    assert (header.rollout_id, header.evaluation, header.hf_checkpoint, header.samples) == (12, None, "model", 3)
    assert all(type(sample.status) is Sample.Status for sample in samples)
    assert math.copysign(1, (samples[0].teacher_log_probs or [0, -0.0])[1]) == -1


def test_a_line_is_json_that_others_can_read(tmp_path):
    path = save_samples(str(tmp_path / TEMPLATE), 0, [group(0, 1.0, label="漢\u2028")])
    header, line = path.read_bytes().splitlines()
    assert json.loads(header)["format"] == "miles-samples"
    assert json.loads(line)["status"] == "pending" and "漢".encode() in line


def test_not_a_number_is_kept(tmp_path):
    save_samples(str(tmp_path / TEMPLATE), 0, [group(0, math.nan, rollout_log_probs=[-math.inf, 0.0])])
    ((sample,),) = load_samples(str(tmp_path / TEMPLATE), 0)
    assert math.isnan(sample.reward) and sample.rollout_log_probs == [-math.inf, 0.0]


def test_evaluations_go_beside_it(tmp_path):
    template = str(tmp_path / "{rollout_id}" / TEMPLATE)
    assert samples_path("a/{rollout_id}.jsonl.gz", 3, "aime") == Path("a/3.eval_aime.jsonl.gz")
    for name in ("a/b", "a%2Fb", "..", "a b-before_train"):
        path = save_samples(template, 3, [group(0, 1.0)], evaluation=name)
        assert path.parent == tmp_path / "3" and read_samples(path)[0].evaluation == name
    assert len(os.listdir(tmp_path / "3")) == 4
    with pytest.raises(ValueError, match="holds samples of the evaluation a/b, which nothing is learned from"):
        load_samples(str(samples_path(template, 3, "a/b")), 3)


def test_pieces_of_a_trajectory_and_groups_stay_together(tmp_path):
    pieces = [*group(5, 1.0, 1.0, rollout_id=2), *group(5, 0.0)]
    groups = [pieces, group(4, 0.5, 0.5), group(6, 0.0)]
    save_samples(str(tmp_path / TEMPLATE), 1, groups)
    assert load_samples(str(tmp_path / TEMPLATE), 1) == groups


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_failed_write_leaves_the_old_file_whole(tmp_path, ending):
    template = str(tmp_path / TEMPLATE) + ending
    save_samples(template, 0, [group(0, 1.0)])
    with pytest.raises(ValueError, match="sample 11 of group 1 cannot be written as JSON: .*set is not JSON"):
        save_samples(template, 0, [group(1, 0.0), [*group(1, 0.0), *group(1, 0.0, 0.0, metadata={"a": {1}})[1:]]])
    assert load_samples(template, 0) == [group(0, 1.0)]


def broken(tmp_path, change, ending=""):
    template = str(tmp_path / TEMPLATE) + ending
    path = save_samples(template, 0, [group(0, 1.0, 0.0)])
    opened = gzip.open if ending else open
    with opened(path, "rb") as file:
        content = file.read()
    with opened(path, "wb") as file:
        file.write(change(content))
    return template


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[: content.rindex(b"\n", 0, -1) + 1], "was cut off: it has 1 samples and says 2"),
        (lambda content: content[:-20], r"rollout_0.jsonl:3: no sample: Unterminated|Expecting"),
        (lambda content: content + content.splitlines()[1] + b"\n", "it has 3 samples and says 2"),
        (lambda content: content[content.index(b"\n") + 1 :], "is no file of samples: its first line is not the head"),
        (lambda content: b"", "is no file of samples"),
        (lambda content: b"[1]\n", "is no file of samples"),
        (lambda content: content.replace(b'"version": 1', b'"version": 2'), "version 2 of the format, and this Miles"),
        (lambda content: content.replace(b'"label"', b'"lable"'), ":2: no sample: a sample has no 'lable'"),
        (
            lambda content: content.replace(b'"pending"', b'"done"'),
            ":2: no sample: 'done' is not a valid Sample",
        ),
        (lambda content: content.replace(b"[1, 2, 3, 4]", b"null"), ":2: no sample: "),
        (lambda content: content.replace(b"[1, 2, 3, 4]", b"[1]"), ":2: no sample: .*response_length 2 does not fit 1"),
        (lambda content: content.splitlines()[0] + b"\n7\n", ":2: no sample: it is no object"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, change, message):
    template = broken(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_samples(template, 0)


def test_a_broken_compressed_file_is_refused(tmp_path):
    template = str(tmp_path / "{rollout_id}.jsonl.gz")
    path = save_samples(template, 0, [group(0, 1.0)])
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for content in (whole[:-9], bytes(damaged), b'{"format": "miles-samples"}\n'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="0.jsonl.gz is no whole gzip file"):
            load_samples(template, 0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file .*rollout_4.jsonl of rollout 4 .*at most as many"):
        load_samples(str(tmp_path / TEMPLATE), 4)


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path):
    for size, folder in ((4, "small"), (5, "large")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    template = str(tmp_path / TEMPLATE)
    save_samples(template, 0, [group(0, 1.0)], hf_checkpoint="theirs")
    assert load_samples(template, 0, str(tmp_path / "large"))
    with pytest.raises(ValueError, match=r"has the token 4, and .*small has 4 tokens: .* another model \(theirs\)"):
        load_samples(template, 0, str(tmp_path / "small"))


def test_a_batch_of_loaded_samples_is_bit_equal(tmp_path):
    draw = random.Random(0)

    def logs():
        return [-draw.expovariate(1) for _ in range(2)]

    groups = [
        [sample for reward in (draw.random(), None) for sample in group(n, reward, rollout_log_probs=logs())]
        for n in range(8)
    ]
    for index, sample in enumerate(sample for one in groups for sample in one):
        sample.index, sample.loss_mask, sample.remove_sample = index, [1, index % 2], index == 5
        sample.status = Sample.Status.TRUNCATED if index % 3 else Sample.Status.COMPLETED
    save_samples(str(tmp_path / TEMPLATE), 0, groups)
    straight, loaded = (
        TrainRows.from_samples(samples, [sample.reward or 0.0 for sample in samples]).select(range(len(samples)))
        for samples in (sum(groups, []), sum(load_samples(str(tmp_path / TEMPLATE), 0), []))
    )
    assert list(straight.columns) == list(loaded.columns)
    for name, values in straight.columns.items():
        assert values.tobytes() == loaded[name].tobytes(), name


@pytest.fixture
def train(tmp_path, tiny_checkpoint, prompt_file):
    """Runs train.py to its end and gives the steps of its metrics.jsonl."""
    (tmp_path / "test_rewards.py").write_text(REWARD)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    base = [
        *("--device", "cpu", "--hf-checkpoint", str(tiny_checkpoint), "--prompt-data", str(prompt_file)),
        *("--custom-rm-path", "test_rewards.share_of_even_bytes", "--num-rollout", "2", "--lr", "0.01"),
        *("--rollout-batch-size", "3", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "8"),
        *(
            "--global-batch-size",
            "6",
            "--actor-num-gpus-per-node",
            "1",
            "--colocate",
            "--data-pad-size-multiplier",
            "8",
        ),
        *("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--entropy-coef", "0.01", "--use-tis"),
        *("--eval-prompt-data", "held_out", str(prompt_file), "--eval-interval", "2"),
        *("--save-debug-rollout-data", "samples/{rollout_id}.jsonl"),
    ]

    def start(name, *flags):
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *base, *flags, "--run-dir", name],
            env={**environment, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    return start


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_training_on_the_samples_of_a_run_is_that_run_again(train, tmp_path):
    """Loss, gradient norm and every other number of the trainer are equal to the last bit, and no engine runs."""
    saved = train("saved")
    files = ["0.eval_held_out-before_train.jsonl", "0.jsonl", "1.eval_held_out.jsonl", "1.jsonl"]
    assert sorted(os.listdir(tmp_path / "samples")) == files
    loaded = train("loaded", "--load-debug-rollout-data", "samples/{rollout_id}.jsonl")
    assert not (tmp_path / "loaded" / "logs").exists()
    assert len(loaded) == len(saved) == 2 and sorted(os.listdir(tmp_path / "samples")) == files
    for again, step in zip(loaded, saved, strict=True):
        of_trainer = {name for name in step if name.startswith("train/")}
        assert of_trainer == {name for name in again if name.startswith("train/")}
        of_samples = {name for name in step if name.startswith("rollout/") and name in again}
        assert {"rollout/raw_reward", "rollout/log_probs", "rollout/response_len/mean"} <= of_samples
        for name in of_trainer | of_samples:
            assert again[name] == step[name], name
        assert step["train/grad_norm"] > 0 and step["train/train_rollout_kl"] != 0
    assert saved[1]["train/kl_loss"] > 0
    assert "perf/update_weights_time" not in loaded[0]
