"""--data-source-path examples.hooks.data_source.Sums

Endless sums of two numbers, made up as they are asked for; --prompt-data is not needed.
"""

import random

from miles.rollout.data_source import DataSource
from miles.utils.types import Sample

HIGHEST = 99


class Sums(DataSource):
    def __init__(self, config, tokenizer):
        self.config = config
        self.tokenizer = tokenizer
        self.next_prompt = 0

    def tokens_of(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def get_samples(self, num_groups):
        groups = []
        for prompt in range(self.next_prompt, self.next_prompt + num_groups):
            numbers = random.Random(f"{self.config.rollout_seed} {prompt}")
            a, b = numbers.randint(0, HIGHEST), numbers.randint(0, HIGHEST)
            size = self.config.n_samples_per_prompt
            groups.append(
                [
                    Sample(
                        group_index=prompt,
                        index=prompt * size + member,
                        prompt=f"{a}+{b}=",
                        tokens=self.tokens_of(f"{a}+{b}="),
                        label=str(a + b),
                    )
                    for member in range(size)
                ]
            )
        self.next_prompt += num_groups
        return groups

    def state_dict(self):
        return {"next_prompt": self.next_prompt}

    def load_state_dict(self, state):
        self.next_prompt = state["next_prompt"]

    def __len__(self):
        return (HIGHEST + 1) ** 2

    @property
    def longest_prompt(self):
        return len(self.tokens_of(f"{HIGHEST}+{HIGHEST}="))
