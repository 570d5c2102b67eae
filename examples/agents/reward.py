"""--custom-rm-path examples.agents.reward.reward

1 where the last answer is the label. The response as a whole holds the calls and their results, too.
"""


async def reward(config, sample):
    conversation = sample.metadata.get("miles_multi_turn", sample.metadata)  # of multi_turn, or what the agent returned
    return float((conversation.get("answer") or "").strip() == sample.label)
