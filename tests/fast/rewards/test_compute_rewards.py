import asyncio
import logging
import math

import numpy as np
import pytest

from miles import rewards as rewards_module
from miles.rewards import check_errors, compute_rewards, load_reward
from miles.rewards import custom as custom_module
from miles.utils.types import Sample

MODULE = """
import asyncio

calls = []

async def from_metadata(config, sample):
    value = sample.metadata["value"]
    if isinstance(value, Exception):
        raise value
    return value

async def waits_for_all(config, sample):
    calls.append(sample.index)
    while len(calls) < 8:
        await asyncio.sleep(0.001)
    return 1

async def sleeps(config, sample):
    await asyncio.sleep(60 if sample.index == 3 else 0)
    return 1.0

async def one_parameter(sample):
    return 1.0

def blocking(config, sample):
    return 1.0
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


async def test_an_error_is_counted_apart_and_is_no_zero(custom, caplog, monkeypatch):
    monkeypatch.setattr(rewards_module, "_logged_errors", set())
    samples = with_values(1.0, math.nan, 0.0, KeyError("lost"), math.inf, "1", None)
    with caplog.at_level(logging.WARNING):
        counts = await compute_rewards(custom("from_metadata"), samples)
    assert [sample.reward for sample in samples] == [1.0, None, 0.0, None, None, None, None]
    assert (counts.samples, counts.abstained, counts.errors) == (7, 1, 4)
    assert counts.first_error == "sample 1 of group 0: ValueError: the reward is nan"
    assert [record.exc_info[0] for record in caplog.records] == [ValueError, KeyError, TypeError]


async def test_the_run_stops_above_the_allowed_fraction(custom):
    values = [1.0, RuntimeError("no judge"), 1.0, 1.0]
    counts = [await compute_rewards(custom("from_metadata"), with_values(*values))]
    check_errors(counts, 0.25)
    with pytest.raises(RuntimeError, match="failed for 1 of 4 samples; .* allows 0.24. The first: sample 1 .*no judge"):
        check_errors(counts, 0.24)


async def test_a_dict_needs_its_key(custom):
    samples = with_values({"acc": 1, "length": 7})
    assert (await compute_rewards(custom("from_metadata", reward_key="acc"), samples)).errors == 0
    assert samples[0].reward == 1.0
    for key, given in ((None, "is not given"), ("score", "names 'score'")):
        counts = await compute_rewards(custom("from_metadata", reward_key=key), samples)
        assert counts.first_error.endswith(f"the reward is a dict with 'acc', 'length', and --reward-key {given}")
        assert samples[0].reward is None


async def test_rewards_run_at_the_same_time(custom):
    async with asyncio.timeout(10):
        await compute_rewards(custom("waits_for_all"), with_values(*range(8)))


async def test_a_sleeping_reward_fails_alone(custom, monkeypatch):
    monkeypatch.setattr(custom_module, "TIME_LIMIT_S", 0.2)
    samples = with_values(*range(8))
    counts = await compute_rewards(custom("sleeps"), samples)
    assert counts.errors == 1 and "TimeoutError" in counts.first_error
    assert [sample.reward for sample in samples] == [1.0] * 3 + [None] + [1.0] * 4


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one_parameter", r"takes \(sample\); it must take \(config, sample\)"),
        ("blocking", "must be an async function"),
        ("missing", "can't be imported"),
    ],
)
def test_a_custom_function_is_checked_before_the_start(custom, function, message):
    with pytest.raises(ValueError, match=message):
        load_reward(custom(function))


def test_the_reward_must_be_named_once_and_have_labels(engine_config):
    for update in ({"rm_type": None}, {"custom_rm_path": "a.b"}):
        with pytest.raises(ValueError, match="exactly one of --rm-type"):
            load_reward(engine_config.model_copy(update=update))
    for path in ("plain", "no_such_package.reward", ""):
        with pytest.raises(ValueError, match="can't be imported"):
            load_reward(engine_config.model_copy(update={"rm_type": None, "custom_rm_path": path}))
    with pytest.raises(ValueError, match="--rm-type exact compares with labels"):
        load_reward(engine_config.model_copy(update={"label_key": None}))
