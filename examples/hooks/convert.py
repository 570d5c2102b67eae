"""--custom-convert-samples-to-train-data-path examples.hooks.convert.convert

Trains on the first MOST_TOKENS tokens of each response.
"""

from miles.rollout.reward_shaping import shaped_rewards
from miles.rollout.train_data import train_data

MOST_TOKENS = 4


def convert(config, samples):
    _, rewards = shaped_rewards(config, samples)
    data = train_data(samples, rewards)
    data["loss_masks"] = [
        [value if place < MOST_TOKENS else 0 for place, value in enumerate(mask)] for mask in data["loss_masks"]
    ]
    return data
