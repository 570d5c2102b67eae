"""What tests of the collector have in common."""

import json

from miles.rollout.collector import Collector
from miles.rollout.hooks import Hooks
from miles.tracking.metrics import describe
from tests.fast.rollout.fake_pool import FakePrompts

SIZE = 2  # samples of a group


def small_rollouts(engine_config):
    """A configuration of rollouts of two groups of two samples."""
    return engine_config.model_copy(
        update={
            "rollout_batch_size": 2,
            "over_sampling_batch_size": 2,
            "n_samples_per_prompt": SIZE,
            "max_failed_sample_fraction": 1.0,
            "async_max_concurrent_samples": 4,
        }
    )


def make(config, pool, hooks=None, prompts=None, **changes):
    return Collector(config.model_copy(update=changes), prompts or FakePrompts(SIZE), pool, hooks or Hooks())


def numbers(groups):
    return [group[0].group_index for group in groups]


def members(*groups):
    """Indices of the samples of groups."""
    return [index for group in groups for index in range(group * SIZE, group * SIZE + SIZE)]


def counts(collected):
    """What became of the groups, without what did not occur."""
    prefix = "rollout/groups/"
    assert all(describe(name) for name in collected.metrics)
    return {k.removeprefix(prefix): v for k, v in collected.metrics.items() if k.startswith(prefix) and v}


def waiting(collector):
    """Numbers of the finished and of the unfinished groups that a checkpoint would have."""
    state = json.loads(json.dumps(collector.state_dict()))
    return tuple([group[0]["group_index"] for group in state[name]] for name in ("finished", "unfinished"))
