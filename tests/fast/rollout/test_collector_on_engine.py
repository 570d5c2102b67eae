"""The collector with a real SGLang server: responses cut off in flight, and gone on with."""

import asyncio
import copy
import json

import pytest
from transformers import AutoTokenizer

from miles.engines.client import SGLangClient
from miles.rollout.base_types import DynamicFilterOutput
from miles.rollout.collector import Collector
from miles.rollout.engine_pool import EnginePool
from miles.rollout.hooks import Hooks
from miles.rollout.user_functions import dynamic_filter
from miles.utils.types import Sample

CONTEXT = 300
LONG, SHORT = 290, 4  # tokens of prompts whose responses are short and long


class Prompts:
    """Groups of four samples; the lengths of the prompts decide how long the responses may be."""

    def __init__(self, lengths):
        self._lengths, self._group_index = iter(lengths), 0

    def get_samples(self, num_groups):
        groups = []
        for _ in range(num_groups):
            tokens = [97 + self._group_index] * next(self._lengths)
            group = [
                Sample(group_index=self._group_index, index=4 * self._group_index + i, label="a") for i in range(4)
            ]
            for sample in group:
                sample.tokens = list(tokens)
            groups.append(group)
            self._group_index += 1
        return groups


@pytest.fixture
async def client(engine_server):
    """Of the server that all tests share; its version is put back."""
    async with SGLangClient(engine_server) as client:
        before = (await client.model_info())["weight_version"]
        await client.update_weight_version("1")
        yield client
        await client.update_weight_version(before)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


async def all_live():
    return {}


@pytest.fixture
def make(engine_config, client, tokenizer):
    def build(lengths, hooks=None, **changes):
        changes = {
            "rollout_max_context_len": CONTEXT,
            "rollout_max_response_len": CONTEXT,
            "rollout_batch_size": 2,
        } | changes
        config = engine_config.model_copy(update=changes)
        pool = EnginePool(config, [client], 64, tokenizer, all_live)
        return Collector(config, Prompts(lengths), pool, hooks or Hooks())

    return build


def numbers(groups):
    return [group[0].group_index for group in groups]


@pytest.mark.parametrize("kind", ["partial", "anew", "stale"])
async def test_responses_cut_off_in_flight(make, client, kind):
    """Two rollouts: the first ends while groups 2 and 3 are written; the second, after a resume, finishes them."""
    changes = {"partial_rollout": kind != "anew", "max_weight_staleness": 0 if kind == "stale" else None}
    collector = make([LONG, LONG, SHORT, SHORT], over_sampling_batch_size=4, **changes)
    first = await collector.collect(0, 1)
    assert numbers(first.groups) == [0, 1]
    assert await client.running_requests() == 0
    state = json.loads(json.dumps(collector.state_dict()))
    assert numbers([[Sample.from_dict(f) for f in group] for group in state["unfinished"]]) == [2, 3]
    before = {fields["index"]: Sample.from_dict(fields) for group in state["unfinished"] for fields in group}
    cut_off = [index for index, sample in before.items() if sample.status in ("aborted", "pending")]
    assert len(cut_off) > 2
    for index in cut_off:
        assert (before[index].response_length > 0) == (kind != "anew")

    await client.update_weight_version("2")
    collector = make([], over_sampling_batch_size=2, **changes)
    collector.load_state_dict(state)
    second = await collector.collect(1, 2)
    assert numbers(second.groups) == [2, 3]
    after = {sample.index: sample for group in second.groups for sample in group}
    for index in cut_off:
        sample, old = after[index], before[index]
        sample.validate()
        assert sample.status in ("completed", "truncated") and sample.prompt_length == SHORT
        assert len(sample.tokens) <= CONTEXT and sample.reward == 0
        assert len(sample.rollout_log_probs) == len(sample.loss_mask) == sample.response_length
        if kind == "partial":
            assert sample.weight_versions == ["1", "2"]
            assert sample.weight_version_lengths[0] == old.response_length < sample.response_length
            assert sample.tokens[: len(old.tokens)] == old.tokens
            assert sample.rollout_log_probs[: old.response_length] == old.rollout_log_probs
        else:
            assert sample.weight_versions == ["2"]


async def test_filtered_groups_are_replaced_and_surplus_is_kept(make):
    """Groups 0 and 2 are refused; all responses are short."""

    def odd(config, samples):
        return DynamicFilterOutput(samples[0].group_index % 2 == 1, "even")

    collector = make([LONG] * 12, Hooks(keep_group=dynamic_filter(odd)), over_sampling_batch_size=3)
    first = await collector.collect(0, None)
    second = await collector.collect(1, None)
    trained = numbers(first.groups) + numbers(second.groups)
    assert trained == sorted(set(trained)) and all(number % 2 for number in trained) and len(trained) == 4
    state = collector.state_dict()
    left = [group[0]["group_index"] for name in ("finished", "unfinished") for group in state[name]]
    seen = numbers(first.all_groups) + numbers(second.all_groups) + left
    assert sorted(seen) == list(range(collector._data._group_index))
    assert first.metrics["rollout/dynamic_filter/drop_even"] >= 1


async def test_background_across_a_weight_sync(make, client):
    """Held, everything in flight has come back with what it has; released, it goes on with the new weights."""
    collector = make([SHORT] * 8, fully_async=True, partial_rollout=True, async_max_concurrent_samples=8)
    collector.start()
    pool = collector._pool
    while pool.in_flight < 8:
        await asyncio.sleep(0.01)
    while not await client.running_requests():
        await asyncio.sleep(0.01)
    await pool.hold()
    assert pool.in_flight == 0 and await client.running_requests() == 0
    snapshot = copy.deepcopy(collector.state_dict())
    await client.update_weight_version("2")
    pool.release()
    collected = await collector.take(0, 2)
    await collector.stop()
    assert all(sample.weight_versions[-1] == "2" for group in collected.groups for sample in group)
    assert any(sample.weight_versions == ["1", "2"] for group in collected.groups for sample in group)
    assert [group[0]["group_index"] for group in snapshot["unfinished"]] == [0, 1]
