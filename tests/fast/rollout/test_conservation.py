"""Whatever happens, in whatever order: every group that was taken from the prompts ends in exactly one place."""

import asyncio
import json
from collections import Counter
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.rollout.base_types import DynamicFilterOutput
from miles.rollout.collector import Collector
from miles.rollout.engine_pool import RequestFailed
from miles.rollout.hooks import Hooks
from miles.rollout.user_functions import dynamic_filter
from tests.fast.rollout.fake_pool import FakePool, FakePrompts

CALM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PLAN = st.fixed_dictionaries(
    {
        "rollout_batch_size": st.integers(1, 3),
        "extra": st.integers(0, 3),
        "n_samples_per_prompt": st.integers(1, 2),
        "partial_rollout": st.booleans(),
        "max_weight_staleness": st.none() | st.integers(0, 2),
        "async_unused_samples_handler": st.sampled_from(["retry", "drop"]),
    }
)


def keep_some(config, samples):
    return DynamicFilterOutput(samples[0].index % 3 != 1, "third")


def make(config, plan, pool, prompts):
    plan = dict(plan)
    update = {
        "over_sampling_batch_size": plan["rollout_batch_size"] + plan.pop("extra"),
        "async_max_concurrent_samples": 4 * plan["n_samples_per_prompt"],
        "max_failed_sample_fraction": 1.0,
        "rollout_sample_retries": 1,
        "dynamic_sampling_max_batches": 1000,
    }
    return Collector(
        config.model_copy(update=plan | update), prompts, pool, Hooks(keep_group=dynamic_filter(keep_some))
    )


def act(pool, random):
    """One thing that an engine does, if it has anything to do: it answers some samples, or fails."""
    for index in random.sample(pool.waiting, min(len(pool.waiting), random.randint(0, 3))):
        pool.finish(index, response=RequestFailed("no") if random.random() < 0.1 else random.choice("ab"))


async def finish(task, pool, random, stop_at=None):
    """Let engines act until the task is done, or cancel it after so many steps; what it returned."""
    steps = 0
    while not task.done():
        await asyncio.sleep(0)
        act(pool, random)
        steps += 1
        if steps == stop_at:
            task.cancel()
            await asyncio.wait({task})
    return None if task.cancelled() else task.result()


def check(handed_out, collector, prompts, size):
    """Each group once: shown as finished, or saved, with all its samples."""
    state = json.loads(json.dumps(collector.state_dict()))
    saved = [[sample["index"] for sample in group] for name in ("finished", "unfinished") for group in state[name]]
    shown = [[sample.index for sample in group] for group in handed_out]
    everyone = Counter(index for group in (*saved, *shown) for index in group)
    assert everyone == dict.fromkeys(range(prompts.group_index * size), 1)
    assert {len(group) for group in (*saved, *shown)} <= {size}
    return state


@CALM
@given(PLAN, st.integers(0, 2**32))
def test_a_rollout_at_a_time(engine_config, plan, seed):
    random = Random(seed)

    async def run():
        pool, prompts = FakePool(lambda sample: None), FakePrompts(plan["n_samples_per_prompt"])
        collector = make(engine_config, plan, pool, prompts)
        handed_out, trained = [], []
        for rollout_id in range(4):
            pool.version = str(rollout_id)
            stop_at = random.choice([None, None, random.randint(1, 30)])
            collected = await finish(
                asyncio.create_task(collector.collect(rollout_id, rollout_id)), pool, random, stop_at
            )
            assert not pool.waiting and asyncio.all_tasks() == {asyncio.current_task()}
            if collected is None:
                continue
            assert len(collected.groups) == plan["rollout_batch_size"]
            trained += collected.groups
            handed_out += collected.all_groups
            state = check(handed_out, collector, prompts, prompts.size)
            if random.random() < 0.5:
                collector = make(engine_config, plan, pool, prompts)
                collector.load_state_dict(state)
        numbers = [group[0].group_index for group in trained]
        assert len(set(numbers)) == len(numbers)
        for sample in (sample for group in trained for sample in group):
            sample.validate()
            assert sample.status.value in ("completed", "failed")
            assert plan["partial_rollout"] or len(set(sample.weight_versions)) <= 1

    asyncio.run(run())


@CALM
@given(PLAN, st.integers(0, 2**32))
def test_all_the_time(engine_config, plan, seed):
    random = Random(seed)

    async def run():
        pool, prompts = FakePool(lambda sample: None), FakePrompts(plan["n_samples_per_prompt"])
        config = engine_config.model_copy(update={"fully_async": True})
        collector = make(config, plan, pool, prompts)
        collector.start()
        handed_out = []
        for rollout_id in range(4):
            task = asyncio.create_task(collector.take(rollout_id, int(pool.version)))
            collected = await finish(task, pool, random)
            assert len(collected.groups) == plan["rollout_batch_size"]
            handed_out += collected.all_groups
            for _ in range(random.randint(0, 10)):
                await asyncio.sleep(0)
                act(pool, random)
            if random.random() < 0.8:
                await pool.hold()
                pool.version = str(rollout_id + 1)
                pool.release()
            if random.random() < 0.3:
                await collector.stop()
                # What was refused since the last rollout is gone, and nobody was told.
                handed_out += collector._refused
                state = check(handed_out, collector, prompts, prompts.size)
                collector = make(config, plan, pool, prompts)
                collector.load_state_dict(state)
                collector.start()
        await collector.stop()
        handed_out += collector._refused
        check(handed_out, collector, prompts, prompts.size)
        assert not pool.waiting and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
