"""--rollout-function-path examples.hooks.rollout.rollout

Answers every prompt with two groups of samples, and trains on the better one.
"""

import asyncio
import copy

from miles.rewards.compute import compute_rewards
from miles.rollout.base_types import RolloutFnTrainOutput
from miles.rollout.generate import Sampling, generate


async def rollout(config, rollout_id, data_source, evaluation=False):
    sampling = Sampling.for_rollout(config)

    async def answered(group):
        await asyncio.gather(*(generate(config, sample, sampling.parameters(sample)) for sample in group))
        await compute_rewards(config, group)
        return group

    async def best_of_two(prompts):
        first, second = await asyncio.gather(answered(copy.deepcopy(prompts)), answered(prompts))
        return max(first, second, key=lambda group: sum(sample.reward or 0 for sample in group))

    groups = await asyncio.gather(*map(best_of_two, data_source.get_samples(config.rollout_batch_size)))
    return RolloutFnTrainOutput(groups, {"rollout/groups_answered": 2 * len(groups)})
