"""--custom-rm-path examples.hooks.reward.reward

The share of the label's characters that the response begins with; an empty response abstains.
"""


async def reward(config, sample):
    if not sample.response:
        return None
    equal = [a == b for a, b in zip(sample.response, sample.label, strict=False)]
    return (equal + [False]).index(False) / len(sample.label)
