"""--custom-generate-function-path examples.hooks.generate.generate

Answers within half of the budget at first; what did not come to an end there gets the other half.
"""

from miles.rollout.generate import generate as complete
from miles.utils.types import Sample


async def generate(config, sample, sampling_params):
    budget = sampling_params["max_new_tokens"]
    half = {**sampling_params, "max_new_tokens": max(1, budget // 2)}
    written = sample.response_length
    await complete(config, sample, half)
    sample.metadata["halves"] = 1
    # An aborted sample is handed back: the function is called with it again, in a later rollout perhaps.
    if sample.status is Sample.Status.TRUNCATED:
        left = budget - (sample.response_length - written)
        sample.metadata["halves"] = 2
        await complete(config, sample, {**sampling_params, "max_new_tokens": left})
    return sample
