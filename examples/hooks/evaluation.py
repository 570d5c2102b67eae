"""--eval-function-path examples.hooks.evaluation.evaluate

Asks the first prompts of the training data again, greedily, as a set of the name "seen".
"""

import asyncio
import dataclasses

from miles.rewards.compute import compute_rewards
from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.data_source import PromptDataset
from miles.rollout.engine_pool import current
from miles.rollout.generate import Sampling, generate


async def evaluate(config, rollout_id, data_source, evaluation=True):
    dataset = PromptDataset.from_config(
        config, config.prompt_data[0], current().tokenizer, input_key=config.input_key, label_key=config.label_key
    )
    samples = dataset.take(range(min(4, len(dataset))))
    for place, sample in enumerate(samples):
        sample.index = sample.group_index = place
    greedy = dataclasses.replace(Sampling.for_rollout(config), temperature=0.0)
    await asyncio.gather(*(generate(config, sample, greedy.parameters(sample)) for sample in samples))
    await compute_rewards(config, samples, evaluation=True)
    return RolloutFnEvalOutput({"seen": samples})
