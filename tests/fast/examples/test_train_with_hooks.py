"""`python train.py` with the examples as a user names them: each is called, and what it does is seen in the outcome."""

import json

import pytest

from tests.fast.examples.test_hooks import EXAMPLES, flags_of
from tests.fast.test_train import Run, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# An eighth of all ids ends a response, so that some responses end before the limit and some don't.
STOP_IDS = [str(token) for token in range(0, 264, 8)]


@pytest.fixture
def train(tmp_path, tiny_checkpoint, prompt_file):
    """Runs two rollouts of three groups of four samples with the flags of these examples; returns its steps."""

    def run(*examples, more=()):
        flags = []
        for example in examples:
            for name, value in flags_of(EXAMPLES / f"{example}.py").items():
                flags += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
        base = [
            *("--device", "cpu", "--hf-checkpoint", str(tiny_checkpoint), "--prompt-data", str(prompt_file)),
            *("--label-key", "label", "--num-rollout", "2", "--rollout-batch-size", "3", "--n-samples-per-prompt", "4"),
            *("--rollout-max-response-len", "8", "--rollout-max-context-len", "64", "--lr", "0.01"),
            *("--rollout-stop-token-ids", *STOP_IDS, "--data-pad-size-multiplier", "8"),
            *("--actor-num-gpus-per-node", "1", "--colocate", "--rollout-engine-start-timeout", "300"),
        ]
        runs.append(Run([*base, *flags, *more], tmp_path / "run"))
        assert runs[-1].wait() == 0, runs[-1].output[-5000:]
        return steps_of(tmp_path / "run"), runs[-1].output

    runs: list[Run] = []
    yield run
    for one in runs:
        one.end()


def test_many_at_once(train, tmp_path):
    steps, output = train(
        *("data_source", "generate", "reward", "reward_post_process", "dynamic_filter", "buffer_filter"),
        *("sample_filter", "all_samples", "convert", "log_rollout", "evaluation", "log_eval", "tis"),
        "rollout_data_postprocess",
        more=("--eval-interval", "1", "--over-sampling-batch-size", "4"),
    )
    assert len(steps) == 2
    for step in steps:
        # sample_filter: what was cut off is removed, and nothing else.
        assert 0 < step["rollout/removed_ratio"] == step["rollout/truncated_ratio"] < 1
        # reward_post_process: a baseline instead of the group's mean, and 0 for an empty response, which abstains.
        scored = 1 - step["rollout/none_reward_ratio"]
        assert step["rollout/rewards"] == pytest.approx(scored * (step["rollout/raw_reward"] - 0.5))
        assert step["rollout/advantages"] < 0 and step["train/grad_norm"] > 0
        assert 0 < step["train/tis"] <= 3
        assert "eval/seen" in step
    # In the second a surplus group may be of the first weights.
    assert steps[0]["train/tis"] == pytest.approx(1, abs=1e-3)
    # all_samples: every prompt is one of data_source.
    lines = [json.loads(line) for line in (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()]
    assert len(lines) >= 6 and all("+" in line["prompt"] for line in lines)
    assert output.count("rollout 0, 12 samples in ") == output.count("rollout 1, 12 samples in ") == 1
    assert output.count("evaluation seen after rollout") == 3


def test_a_rollout_of_ones_own(train):
    steps, output = train("rollout", "group_reward", "loss", "log_rollout")
    assert [step["rollout/groups_answered"] for step in steps] == [6, 6]
    assert all(0 < step["rollout/raw_reward"] <= 1 and step["train/grad_norm"] > 0 for step in steps)
    assert output.count("12 samples in ") == 2


def test_a_path_that_is_wrong_ends_in_one_sentence(tmp_path, tiny_checkpoint, prompt_file):
    """One whose module can't be imported, where it would be called; one that is not there, before anything starts."""
    (tmp_path / "broken_filter.py").write_text("import no_such_package\n\ndef drop(config, groups): ...\n")
    for path, status, sentence in (
        ("broken_filter.drop", 1, "error: --rollout-sample-filter-path broken_filter.drop: can't be imported"),
        ("examples.hooks.sample_filter.drop", 2, "examples.hooks.sample_filter has no drop"),
    ):
        run = Run(
            [
                *("--device", "cpu", "--hf-checkpoint", str(tiny_checkpoint), "--prompt-data", str(prompt_file)),
                *("--label-key", "label", "--rm-type", "exact", "--num-rollout", "1", "--rollout-batch-size", "3"),
                *("--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"),
                *("--actor-num-gpus-per-node", "1", "--colocate", "--rollout-sample-filter-path", path),
            ],
            tmp_path / "run",
        )
        assert run.wait() == status, run.output
        assert sentence in run.output and "Traceback" not in run.output
        run.end()
