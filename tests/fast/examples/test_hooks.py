"""Every example in examples/hooks does what it says, called as a run calls it."""

import asyncio
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from miles.config import RunConfig
from miles.config.hooks import HooksConfig
from miles.config.names import flag_of
from miles.engines.client import SGLangClient
from miles.rewards.compute import compute_rewards, load_reward
from miles.rollout.engine_pool import EnginePool
from miles.rollout.generate import Sampling
from miles.rollout.hooks import load_hooks
from miles.rollout.prompts.data_source import load_data_source, take_groups
from miles.training.custom import load_custom_loss, load_custom_tis
from miles.training.data_postprocess import postprocessed
from miles.utils.types import Sample
from tests.fast.rollout.finished_samples import finished, four_samples, two_groups
from tests.fast.training.micro_batches import make_batch, sums_of, whole_step

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "hooks"
GUIDE = ROOT / "docs" / "user-guide" / "customisation.md"


def flags_of(example):
    """The flags in the first line of a file, by name."""
    words = example.read_text().removeprefix('"""').split("\n", 1)[0].split()
    flags = {}
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            flags[word.removeprefix("--").replace("-", "_")] = True if value.startswith("--") or not value else value
    return flags


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture
def configured(engine_config):
    """The configuration with the flags of an example, and two groups of two samples."""

    def configure(example: str, **changes) -> RunConfig:
        flags = flags_of(EXAMPLES / f"{example}.py")
        assert set(flags) <= set(RunConfig.model_fields)
        sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "advantage_estimator": "grpo"}
        return engine_config.model_copy(update={**sizes, **flags, **changes})

    return configure


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture
async def pool(engine_config, engine_server, tokenizer):
    async def all_live():
        return {}

    client = SGLangClient(engine_server, request_timeout=30)
    yield EnginePool(engine_config, [client], 64, tokenizer, all_live)
    await client.close()


async def test_rollout(configured, pool, tokenizer):
    config = configured("rollout")
    data = load_data_source(config, tokenizer)
    with pool.active():
        output = await load_hooks(config, None).rollout(config, 0, data)
    assert output.metrics == {"rollout/groups_answered": 4.0}
    assert data.state_dict()["group_index"] == 2
    assert all(sample.reward is not None for group in output.samples for sample in group)


async def test_evaluation(configured, pool):
    config = configured("evaluation")
    with pool.active():
        output = await load_hooks(config, None).evaluate(config, 0, None)
    assert [sample.prompt for sample in output.data["seen"]] == ["a", "ab", "abc", "abcd"]


async def test_generate(configured, pool):
    config = configured("generate")
    sampling = Sampling.for_rollout(config)
    samples = [Sample(group_index=0, index=index, tokens=[97, 98, index]) for index in range(8)]

    async def answer(sample):
        with pool.active():
            (answered,) = await load_hooks(config, None).generate.function(config, sample, sampling.parameters(sample))
        assert answered is sample
        return sample

    await asyncio.gather(*map(answer, samples))
    halves = {sample.metadata["halves"] for sample in samples}
    for sample in samples:
        assert len(sample.weight_versions) == sample.metadata["halves"]
        if sample.status is Sample.Status.TRUNCATED:
            assert sample.response_length == 8 and sample.metadata["halves"] == 2
    assert 2 in halves


async def test_reward(configured):
    config = configured("reward", rm_type=None)
    load_reward(config)
    samples = [Sample(response=response, label="abc") for response in ("abc", "abcdef", "abx", "xbc", "")]
    counts = await compute_rewards(config, samples)
    assert [sample.reward for sample in samples] == [1.0, 1.0, pytest.approx(2 / 3), 0.0, None]
    assert (counts.errors, counts.abstained) == (0, 1)


async def test_group_reward(configured):
    config = configured("group_reward", rm_type=None)
    samples = [Sample(group_index=0, response_length=length) for length in (5, 3, 3)]
    await compute_rewards(config, samples)
    assert [sample.reward for sample in samples] == [0.0, 1.0, 1.0]


def test_reward_post_process(configured):
    config = configured("reward_post_process")
    samples = four_samples()
    samples[3].reward = None
    assert load_hooks(config, None).shape_rewards(config, samples) == ([1.0, 0.0, 0.0, None], [0.5, -0.5, -0.5, 0.0])


def test_dynamic_filter(configured):
    config = configured("dynamic_filter")
    hooks = load_hooks(config, None)
    assert hooks.keep_group(config, [finished(0, 0), finished(1, 0, 0.0)]).keep
    refused = hooks.keep_group(config, [finished(0, 0), finished(1, 0)])
    assert (refused.keep, refused.reason) == (False, "all_right")


def test_buffer_filter(configured):
    config = configured("buffer_filter")
    buffer = [[finished(0, 0)], [Sample(group_index=1, index=1, tokens=[1])], [finished(2, 2), finished(3, 2)]]
    none, one, two = buffer[1], buffer[0], buffer[2]
    assert load_hooks(config, None).take_from_buffer(config, 0, buffer, 2) == ([one, two], [])
    assert buffer == [none]
    assert load_hooks(config, None).take_from_buffer(config, 0, buffer, 2) == ([none], [])


def test_sample_filter(configured):
    config = configured("sample_filter")
    groups = two_groups()
    groups[1][0].status = Sample.Status.TRUNCATED
    load_hooks(config, None).filter_samples(config, groups)
    assert [[sample.remove_sample for sample in group] for group in groups] == [[False, False], [True, False]]


def test_all_samples(configured, tmp_path):
    config = configured("all_samples", run_dir=str(tmp_path))
    groups = two_groups()
    groups[0][0].prompt = "what?"
    groups[1][0].reward = groups[1][1].reward = None
    load_hooks(config, None).show_all_samples(config, groups, None)
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert lines == [{"prompt": "what?", "mean_reward": 0.5}, {"prompt": "", "mean_reward": None}]


def test_convert(configured):
    config = configured("convert")
    samples = four_samples()
    samples[0].tokens, samples[0].response_length = [1] * 8, 6
    samples[0].loss_mask, samples[0].rollout_log_probs = [0, 1, 1, 1, 1, 1], [-1.0] * 6
    hooks = load_hooks(config, None)
    raw, rewards = hooks.shape_rewards(config, samples)
    batch = hooks.make_batch(config, samples, raw, rewards)
    assert np.concatenate(batch["loss_masks"]).tolist() == [0, 1, 1, 1, 0, 0, *[1] * 6]
    assert batch["rewards"].tolist() == pytest.approx(rewards)


def test_log_rollout(configured, capsys):
    config = configured("log_rollout")
    samples = four_samples()
    samples[0].response, samples[1].reward = "good", None
    assert load_hooks(config, None).log_rollout(config, 2, samples, {}, 1.25) is False
    assert capsys.readouterr().out == "rollout 2, 4 samples in 1.2 s; reward 1.0: 'good'\n"


def test_log_eval(configured, capsys):
    config = configured("log_eval")
    assert load_hooks(config, None).log_eval(config, 2, {"sums": four_samples()}, {}) is False
    assert capsys.readouterr().out == "evaluation sums after rollout 2: 1 of 4 right\n"


def test_data_source(configured, tokenizer):
    config = configured("data_source", prompt_data=None)
    source = load_data_source(config, tokenizer)
    first, second = take_groups(config, source, 1), take_groups(config, source, 2)
    assert [sample.index for group in first + second for sample in group] == [0, 1, 2, 3, 4, 5]
    for sample in first[0]:
        assert tokenizer.decode(sample.tokens) == sample.prompt
        a, b = sample.prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(sample.label) and len(sample.tokens) <= source.longest_prompt
    resumed = load_data_source(config, tokenizer)
    resumed.load_state_dict(json.loads(json.dumps({"next_prompt": 1})))
    assert take_groups(config, resumed, 2) == second
    assert source.state_dict() == resumed.state_dict()


def test_loss():
    (path,) = (value for value in flags_of(EXAMPLES / "loss.py").values() if "." in value)
    masks = [[1, 1], [1, 1]]
    packed = whole_step(masks, advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]))
    log_probs_N = torch.tensor([-1.0, -3.0, -1.0, -1.0], requires_grad=True)
    loss, metrics = load_custom_loss(path)(None, log_probs_N, torch.zeros(4), packed, sums_of(masks))
    loss.backward()
    assert loss.item() == pytest.approx((2 - 1) / 2) and metrics["train/loss"] == loss
    assert log_probs_N.grad.tolist() == [-0.25, -0.25, 0.25, 0.25]


def test_tis():
    (path,) = flags_of(EXAMPLES / "tis.py").values()
    masks = [[1, 1], [1, 1]]
    packed = whole_step(masks, advantages=torch.ones(4))
    rollout_N = torch.full((4,), -2.0)
    old_N = rollout_N + torch.tensor([0.0, 9.0, 0.0, 0.0])
    weight_N, metrics = load_custom_tis(path)(None, old_N, rollout_N, packed, sums_of(masks))
    assert weight_N.tolist() == [1, 3, 1, 1] and metrics["train/tis"].item() == 1.5


def test_rollout_data_postprocess():
    (path,) = flags_of(EXAMPLES / "rollout_data_postprocess.py").values()
    config = SimpleNamespace(rollout_data_postprocess_path=path)
    replaced = postprocessed(config, 0, make_batch([[1, 1, 1]]), {"advantages": torch.tensor([-3.0, 1.0, 3.0])})
    assert replaced["advantages"].tolist() == [-2.0, 1.0, 2.0]


def test_every_example_has_a_test_and_a_line_in_the_guide():
    names = sorted(example.stem for example in EXAMPLES.glob("*.py"))
    assert [name for name in names if f"test_{name}" not in globals()] == []
    guide = GUIDE.read_text()
    for name in names:
        assert f"../../examples/hooks/{name}.py" in guide
        for flag in flags_of(EXAMPLES / f"{name}.py"):
            assert f"`{flag_of(flag)}" in guide or f" {flag_of(flag)}" in guide


def test_code_in_the_guide_is_that_of_the_examples():
    blocks = GUIDE.read_text().split("```python\n")[1:]
    codes = [example.read_text() for example in EXAMPLES.glob("*.py")]
    assert blocks
    for block in (block.split("```")[0] for block in blocks):
        assert any(block in code for code in codes), block


def test_every_hook_flag_has_an_example():
    given = set().union(*(flags_of(example) for example in EXAMPLES.glob("*.py")))
    assert set(HooksConfig.model_fields) <= given


def test_examples_are_short():
    for example in EXAMPLES.glob("*.py"):
        assert importlib.import_module(f"examples.hooks.{example.stem}").__doc__
        assert len(example.read_text().splitlines()) <= 60
