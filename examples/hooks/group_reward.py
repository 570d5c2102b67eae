"""--group-rm --custom-rm-path examples.hooks.group_reward.reward

1 for the shortest responses of the group, 0 for the others.
"""


async def reward(config, samples):
    shortest = min(sample.response_length for sample in samples)
    return [float(sample.response_length == shortest) for sample in samples]
