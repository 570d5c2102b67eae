import asyncio
import json
import logging
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from miles.rewards import compute as compute_module
from miles.rewards import custom as custom_module
from miles.rewards.compute import check_errors, compute_rewards, load_reward
from miles.utils.errors import UserError
from miles.utils.types import Sample

MODULE = """
import asyncio
import time

calls = []

async def from_metadata(config, sample):
    value = sample.metadata["value"]
    if isinstance(value, BaseException):
        raise value
    return value

async def writes_into_metadata(config, sample):
    sample.metadata["parts"] = sample.metadata["value"]
    return 1.0

async def waits_for_all(config, sample):
    calls.append(sample.index)
    while len(calls) < 8:
        await asyncio.sleep(0.001)
    return 1

async def sleeps(config, sample):
    await asyncio.sleep(60 if sample.index == 3 else 0)
    return 1.0

async def of_the_group(config, samples):
    calls.append([sample.index for sample in samples])
    if samples[0].metadata.get("fails"):
        raise RuntimeError("no judge")
    return samples[0].metadata.get("values", [1.0] * len(samples))

async def one_parameter(sample):
    return 1.0

def blocks(config, sample):
    time.sleep(5 if sample.index == 3 else 0)
    return 1.0

def at_once(config, samples):
    return [1.0, 0.5]
"""


@pytest.fixture
def custom(engine_config, tmp_path, monkeypatch, request):
    """A configuration whose reward is the named function of MODULE."""
    name = f"rewards_of_{request.node.name.split('[')[0]}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def config(function, **changes):
        changes = {"rm_type": None, "custom_rm_path": f"{name}.{function}"} | changes
        return engine_config.model_copy(update=changes)

    return config


def with_values(*values):
    return [Sample(index=i, group_index=0, metadata={"value": value}) for i, value in enumerate(values)]


async def test_exact(engine_config):
    done, cut = Sample.Status.COMPLETED, Sample.Status.TRUNCATED
    cases = [
        ("42", done, 1.0),
        (" 42\n", done, 1.0),
        ("42", cut, 0.0),
        ("420", done, 0.0),
        ("", done, 0.0),
        ("4 2", done, 0.0),
    ]
    samples = [Sample(response=text, status=status, label="42") for text, status, _ in cases]
    counts = await compute_rewards(engine_config, samples)
    assert [sample.reward for sample in samples] == [reward for *_, reward in cases]
    assert (counts.samples, counts.abstained, counts.errors, counts.first_error) == (6, 0, 0, None)


async def test_scalars_are_cast_and_none_abstains(custom):
    samples = with_values(True, 2, np.float32(0.5), np.int64(3), np.bool_(False), None)
    counts = await compute_rewards(custom("from_metadata"), samples)
    assert [sample.reward for sample in samples] == [1.0, 2.0, 0.5, 3.0, 0.0, None]
    assert all(type(sample.reward) is float for sample in samples[:-1])
    assert (counts.abstained, counts.errors) == (1, 0)


async def test_what_a_function_that_generates_leaves_open(engine_config):
    """Without a reward of the run's own: rows may name one, else it is an error of the sample."""
    generates = {"rm_type": None, "custom_generate_function_path": "my_module.generate"}
    config = engine_config.model_copy(update=generates)
    samples = [Sample(index=0, response="a", label="a", status=Sample.Status.COMPLETED) for _ in range(2)]
    samples[0].metadata["rm_type"] = "exact"
    for evaluation in (False, True):
        counts = await compute_rewards(config, samples, evaluation=evaluation)
        assert [sample.reward for sample in samples] == [1.0, None] and counts.errors == 1
        assert counts.first_error.endswith("set no reward, and there is neither --rm-type nor --custom-rm-path")


async def test_an_error_is_counted_apart_and_is_no_zero(custom, caplog, monkeypatch):
    monkeypatch.setattr(compute_module, "_logged_errors", set())
    samples = with_values(1.0, math.nan, 0.0, KeyError("lost"), math.inf, "1", None)
    with caplog.at_level(logging.WARNING):
        counts = await compute_rewards(custom("from_metadata"), samples)
    assert [sample.reward for sample in samples] == [1.0, None, 0.0, None, None, None, None]
    assert (counts.samples, counts.abstained, counts.errors) == (7, 1, 4)
    assert counts.first_error == "sample 1 of group 0: ValueError: the reward is nan"
    errors = [record.exc_info[1] for record in caplog.records]
    assert [type(error.__cause__ or error) for error in errors] == [ValueError, KeyError, TypeError]


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), asyncio.CancelledError(), ImportError("none")])
async def test_whatever_a_reward_raises_is_its_own(custom, error):
    """What would end the event loop, or the task that rewards all the others."""
    samples = with_values(1.0, error, 0.0)
    counts = await compute_rewards(custom("from_metadata"), samples)
    assert [sample.reward for sample in samples] == [1.0, None, 0.0] and counts.errors == 1
    assert re.match("sample 1 of group 0: --custom-rm-path rewards_of_.*from_metadata failed: ", counts.first_error)


async def test_the_run_stops_above_the_allowed_fraction(custom):
    values = [1.0, RuntimeError("no judge"), 1.0, 1.0]
    counts = [await compute_rewards(custom("from_metadata"), with_values(*values))]
    check_errors(counts, 0.25)
    with pytest.raises(UserError, match="failed for 1 of 4 samples; .* allows 0.24. The first: sample 1 .*no judge"):
        check_errors(counts, 0.24)


async def test_a_dict_needs_its_key(custom):
    samples = with_values({"acc": 1, "length": 7})
    assert (await compute_rewards(custom("from_metadata", reward_key="acc"), samples)).errors == 0
    assert samples[0].reward == 1.0
    assert samples[0].metadata["reward"] == {"acc": 1, "length": 7}
    for key, given in ((None, "is not given"), ("score", "names 'score'")):
        counts = await compute_rewards(custom("from_metadata", reward_key=key), samples)
        assert counts.first_error.endswith(f"the reward is a dict with 'acc', 'length', and --reward-key {given}")
        assert samples[0].reward is None


async def test_numpy_scalars_of_a_dict_can_be_written_as_json(custom):
    given = {"acc": np.float32(0.5), "right": np.bool_(True), "why": "a", "of": np.ones((1, 2)), 3: [torch.tensor(2)]}
    samples = with_values(given)
    await compute_rewards(custom("from_metadata", reward_key="acc"), samples)
    assert samples[0].reward == 0.5
    held = {"acc": 0.5, "right": True, "why": "a", "of": [[1.0, 1.0]], "3": [2]}
    assert json.loads(json.dumps(samples[0].metadata["reward"])) == held


async def test_what_a_reward_writes_can_be_saved_or_is_its_error(custom):
    samples = with_values(np.arange(2), {"a": [{1}]}, (torch.ones(1),), {(1, 2): 0}, torch.ones(1, device="meta"))
    counts = await compute_rewards(custom("writes_into_metadata"), samples)
    assert [sample.reward for sample in samples] == [1.0, None, 1.0, None, None] and counts.errors == 3
    assert counts.first_error.startswith("sample 1 of group 0: metadata['value']['a'][0] is {1} (set), which JSON has")
    written = [sample.metadata for sample in samples]
    assert written == [{"value": [0, 1], "parts": [0, 1]}, {}, {"value": [[1.0]], "parts": [[1.0]]}, {}, {}]


async def test_tensors_of_several_numbers_are_no_reward(custom):
    samples = with_values(torch.ones(2), np.ones(2), torch.ones(1), np.full(1, 0.5))
    counts = await compute_rewards(custom("from_metadata"), samples)
    assert [sample.reward for sample in samples] == [None, None, 1.0, 0.5] and counts.errors == 2


async def test_evaluation_has_its_own_key(custom):
    config = custom("from_metadata", reward_key="score", eval_reward_key="acc")
    for evaluation, reward in ((False, -1.0), (True, 0.0)):
        samples = with_values({"score": -1, "acc": False})
        await compute_rewards(config, samples, evaluation=evaluation)
        assert samples[0].reward == reward
    counts = await compute_rewards(config, with_values({"score": 1}), evaluation=True)
    assert counts.first_error.endswith("a dict with 'score', and --eval-reward-key names 'acc'")


async def test_each_sample_may_choose_its_reward(engine_config):
    config = engine_config.model_copy(update={"rm_type": "f1"})
    choices = [
        {},
        {"rm_type": None},
        {"rm_type": "gpqa"},
        {"rm_type": "boxed_exact"},
        {"rm_type": "bleu"},
        {"rm_type": []},
    ]
    samples = [
        Sample(index=i, label="B", response=r"B \boxed{B}", metadata=metadata, status=Sample.Status.COMPLETED)
        for i, metadata in enumerate(choices)
    ]
    samples.append(Sample(index=6, response="B"))
    samples.append(Sample(index=7, response="B", metadata={"rm_type": "remote_rm"}))
    counts = await compute_rewards(config, samples)
    assert [sample.reward for sample in samples] == [pytest.approx(2 / 3)] * 2 + [1, 1, None, None, None, None]
    assert counts.errors == 4
    assert "metadata names the reward 'bleu'; it must be one of exact, math, dapo" in counts.first_error


async def test_a_sample_without_the_label_or_address_that_its_reward_needs(engine_config):
    counts = await compute_rewards(engine_config, [Sample(response="B")])
    assert "the reward exact compares with a label, and the sample has none" in counts.first_error
    counts = await compute_rewards(engine_config, [Sample(response="B", metadata={"rm_type": "remote_rm"})])
    assert "the reward remote_rm needs --rm-url" in counts.first_error


async def test_a_group_is_rewarded_at_once(custom):
    config = custom("of_the_group", group_rm=True, reward_key="acc")
    samples = [Sample(index=i, group_index=i // 3) for i in range(9)]
    samples[0].metadata["values"] = [True, None, {"acc": 2}]
    samples[3].metadata["fails"] = True
    samples[6].metadata["values"] = [1.0, math.nan, "1"]
    counts = await compute_rewards(config, samples)
    assert [sample.reward for sample in samples] == [1.0, None, 2.0, None, None, None, 1.0, None, None]
    assert (counts.samples, counts.abstained, counts.errors) == (9, 1, 5)
    assert re.fullmatch("sample 3 of group 1: .*of_the_group failed: RuntimeError: no judge", counts.first_error)


@pytest.mark.parametrize("values", [[1.0], [1.0] * 4, 1.0, {"acc": 1}, None])
async def test_a_group_reward_of_another_length_is_an_error_of_all(custom, values):
    samples = [Sample(index=i, group_index=0, metadata={"values": values}) for i in range(3)]
    counts = await compute_rewards(custom("of_the_group", group_rm=True), samples)
    assert counts.errors == 3 and all(sample.reward is None for sample in samples)
    assert "a group reward must return a list of 3 rewards" in counts.first_error


async def test_a_group_reward_without_async(custom):
    samples = [Sample(index=i, group_index=0) for i in range(2)]
    await compute_rewards(custom("at_once", group_rm=True), samples)
    assert [sample.reward for sample in samples] == [1.0, 0.5]


def test_a_group_reward_takes_samples(custom):
    with pytest.raises(ValueError, match=r"takes \(sample\); it must take \(config, samples\)"):
        load_reward(custom("one_parameter", group_rm=True))


async def test_rewards_run_at_the_same_time(custom):
    async with asyncio.timeout(10):
        await compute_rewards(custom("waits_for_all"), with_values(*range(8)))


@pytest.mark.parametrize("function", ["sleeps", "blocks"])
async def test_a_sleeping_reward_fails_alone(custom, monkeypatch, function):
    """Also one that blocks: without async it has a thread of its own, and the time limit acts."""
    monkeypatch.setattr(custom_module, "TIME_LIMIT_S", 2.0)
    samples = with_values(*range(8))
    counts = await compute_rewards(custom(function), samples)
    assert counts.errors == 1 and counts.first_error.endswith(f".{function} failed: it was not done within 2 s")
    assert [sample.reward for sample in samples] == [1.0] * 3 + [None] + [1.0] * 4


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one_parameter", r"takes \(sample\); it must take \(config, sample\)"),
        ("missing", "can't be imported"),
    ],
)
def test_a_custom_function_is_checked_before_the_start(custom, function, message):
    with pytest.raises(ValueError, match=message):
        load_reward(custom(function))


def test_a_custom_function_that_is_not_there(engine_config):
    for path in ("plain", "no_such_package.reward", ""):
        with pytest.raises(ValueError, match="can't be imported"):
            load_reward(engine_config.model_copy(update={"rm_type": None, "custom_rm_path": path}))


async def test_the_documented_rewards(custom, tmp_path):
    """Both examples of the guide, as files of their own."""
    page = (Path(__file__).parents[3] / "docs/user-guide/rewards.md").read_text(encoding="utf-8")
    examples = [block.split("```")[0] for block in page.split("```python\n")[1:] if "async def" in block]
    (tmp_path / "documented_rewards.py").write_text("\n".join(examples))
    samples = [Sample(response=text, label="5", response_length=len(text)) for text in ("5", "  5", "7", "six")]
    for changes, expected in (
        ({"custom_rm_path": "documented_rewards.closeness"}, [1, 1, 1 / 3, 0]),
        ({"custom_rm_path": "documented_rewards.shortest", "group_rm": True}, [1, 0, 0, 0]),
    ):
        counts = await compute_rewards(custom("", **changes), samples)
        assert counts.first_error is None
        assert [sample.reward for sample in samples] == pytest.approx(expected)
