"""Faults that users of such systems report, where no test of a single part shows them."""

from collections import Counter

import pytest
from transformers import AutoTokenizer

from miles.engines.client import SGLangClient
from miles.rewards import BUILT_IN
from miles.rewards.compute import compute_rewards
from miles.rollout.answers import Answer, extend
from miles.rollout.collector import Collector
from miles.rollout.engine_pool import EnginePool
from miles.rollout.hooks import Hooks
from miles.rollout.metrics import rollout_metrics
from miles.rollout.prompts.data_source import RolloutDataSource
from miles.rollout.reward_shaping import shaped_rewards
from miles.rollout.user_functions import dynamic_filter
from miles.utils.types import Sample

END = 259  # <|end|> of the byte tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


# Rewards


@pytest.mark.parametrize("name", [name for name, reward in BUILT_IN.items() if reward.read_label])
async def test_an_empty_response_is_wrong_and_no_error(engine_config, name):
    """B069."""
    numbers = BUILT_IN[name].numbers
    key = "acc" if "acc" in numbers else next(iter(numbers), None)
    config = engine_config.model_copy(update={"rm_type": name, "reward_key": key})
    label = '{"inputs": ["1"], "outputs": ["1"]}' if name == "code" else "B"
    samples = [
        Sample(index=i, response=text, label=label, status=Sample.Status.COMPLETED) for i, text in ((0, ""), (1, " \n"))
    ]
    counts = await compute_rewards(config, samples)
    assert counts.first_error is None
    assert [sample.reward for sample in samples] == [0, 0]


async def test_no_response_at_all_is_an_error_and_no_zero(engine_config):
    """B069: a custom generate function may leave None behind."""
    sample = Sample(index=0, response=None, label="B", status=Sample.Status.COMPLETED)
    counts = await compute_rewards(engine_config, [sample])
    assert (counts.errors, sample.reward) == (1, None)


# Metrics


def test_a_response_at_the_limit_is_truncated_and_one_below_is_not(tokenizer):
    """B155, and B093: an end token at the limit is an end."""
    samples = []
    for ids in ([65] * 4, [65] * 3 + [END], [65, 65, END], [65] * 4):
        sample = Sample(group_index=0, index=len(samples), tokens=[1], reward=0.0)
        answer = Answer(ids, [-1.0] * len(ids), "1", aborted=False, stopped=False)
        ends = {"end_ids": frozenset({END}), "stop_ids": frozenset({END}), "stop_texts": ()}
        limits = {"room": 4, "skip_special_tokens": False} | ends
        extend(sample, answer, tokenizer=tokenizer, **limits)
        samples.append(sample)
    assert rollout_metrics(samples, [0.0] * 4)["rollout/truncated_ratio"] == 0.5


def test_rewards_are_shown_as_they_were_before_shaping(engine_config):
    """B158."""
    samples = [
        Sample(group_index=0, index=i, tokens=[1, 2], response_length=1, loss_mask=[1], reward=float(i))
        for i in range(4)
    ]
    raw, shaped = shaped_rewards(engine_config, samples)
    assert sum(shaped) == pytest.approx(0) and shaped != list(raw)
    assert [sample.reward for sample in samples] == [0, 1, 2, 3] and list(raw) == [0, 1, 2, 3]
    assert rollout_metrics(samples, shaped)["rollout/raw_reward"] == 1.5


# A whole rollout, on a real engine


class UnevenClient(SGLangClient):
    """Ends each response at a length of its own."""

    async def generate(self, input_ids, sampling_params):
        lengths = [min(one["max_new_tokens"], 10 + one["sampling_seed"] % 110) for one in sampling_params]
        pairs = zip(sampling_params, lengths, strict=True)
        return await super().generate(input_ids, [one | {"max_new_tokens": length} for one, length in pairs])


class Rollouts:
    """Rollouts of three groups of two, six asked for at once; the filter refuses each fourth."""

    def __init__(self, config, url, tokenizer, **changes):
        self.config = config.model_copy(
            update={
                "rollout_batch_size": 3,
                "over_sampling_batch_size": 6,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 120,
                "rollout_max_context_len": None,
            }
            | changes
        )
        self.client = UnevenClient(url)
        self.data = RolloutDataSource(self.config, tokenizer)
        pool = EnginePool(self.config, [self.client], 12, tokenizer, self.check_engines)
        hooks = Hooks(keep_group=dynamic_filter(lambda config, samples: samples[0].group_index % 4 != 3))
        self.collector = Collector(self.config, self.data, pool, hooks)
        self.collected = []

    async def check_engines(self):
        return {}

    async def run(self, count):
        before = (await self.client.model_info())["weight_version"]
        for version in range(count):
            await self.client.update_weight_version(str(version))
            self.collected.append(await self.collector.collect(version, version))
        await self.client.update_weight_version(before)
        await self.client.close()

    def waiting(self):
        return [group for groups in self.collector.state_dict().values() for group in groups]


@pytest.mark.parametrize("partial", [True, False])
async def test_every_sample_once_whole_and_of_known_versions(engine_config, engine_server, tokenizer, partial):
    """B085, B086, B087, B090: surplus, unfinished and refused groups, with new weights after each rollout."""
    rollouts = Rollouts(engine_config, engine_server, tokenizer, partial_rollout=partial)
    await rollouts.run(3)

    trained = [sample for collected in rollouts.collected for group in collected.groups for sample in group]
    refused = [
        s for collected in rollouts.collected for group in collected.all_groups for s in group if s.group_index % 4 == 3
    ]
    waiting = [sample["index"] for group in rollouts.waiting() for sample in group]
    assert len(trained) == 3 * 3 * 2 and refused and waiting
    found = Counter([sample.index for sample in (*trained, *refused)] + waiting)
    assert found == Counter(range(rollouts.data.state_dict()["sample_index"]))

    for sample in (*trained, *refused):
        sample.validate()
        assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) and sample.reward is not None
        assert (
            sample.loss_mask == [1] * sample.response_length and len(sample.rollout_log_probs) == sample.response_length
        )
        assert 0 < sample.response_length <= 120 and sum(sample.weight_version_lengths) == sample.response_length
    mixed = [sample for sample in trained if len(set(sample.weight_versions)) > 1]
    assert bool(mixed) == partial
    for collected in rollouts.collected:
        count = {name.removeprefix("rollout/groups/"): value for name, value in collected.metrics.items()}
        outcomes = sum(count[name] for name in ("trained", "surplus", "unfinished", "filtered", "stale", "failed"))
        assert count["new"] + count["from_buffer"] == outcomes and count["trained"] == 3


async def test_stale_groups_are_asked_again_not_lost(engine_config, engine_server, tokenizer):
    """B087: what waited longer than --max-weight-staleness allows is written anew by today's weights."""
    rollouts = Rollouts(engine_config, engine_server, tokenizer, partial_rollout=True, max_weight_staleness=0)
    await rollouts.run(3)
    for version, collected in enumerate(rollouts.collected):
        assert {v for group in collected.groups for sample in group for v in sample.weight_versions} == {str(version)}
    assert sum(collected.metrics["rollout/groups/stale"] for collected in rollouts.collected) > 0
