"""--rollout-all-samples-process-path examples.hooks.all_samples.write_down

Keeps the mean reward of every prompt that was tried, filtered ones too, in the run's folder.
"""

import json
from pathlib import Path


def write_down(config, groups, data_source):
    with (Path(config.run_dir) / "prompts.jsonl").open("a", encoding="utf-8") as file:
        for group in groups:
            rewards = [sample.reward for sample in group if sample.reward is not None]
            mean = sum(rewards) / len(rewards) if rewards else None
            file.write(json.dumps({"prompt": group[0].prompt, "mean_reward": mean}) + "\n")
