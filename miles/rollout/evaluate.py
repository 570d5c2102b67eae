"""Evaluation sets: the held-out prompts of `--eval-prompt-data`."""

import copy
from typing import Any

from miles.config import RunConfig
from miles.rollout.data_source import PromptDataset
from miles.utils.types import Sample


class EvaluationSets:
    """The sets by name, read and checked on construction; each evaluation samples all their prompts anew."""

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        self._samples_per_prompt = config.n_samples_per_eval_prompt
        pairs = config.eval_prompt_data or []
        self._datasets = {
            name: PromptDataset.from_config(
                config, path, tokenizer, input_key=config.eval_input_key, label_key=config.eval_label_key
            )
            for name, path in zip(pairs[::2], pairs[1::2], strict=True)
        }

    def groups(self) -> dict[str, list[list[Sample]]]:
        """Fresh samples of each set, `n_samples_per_eval_prompt` a prompt, with indices of their own set."""
        return {name: self._groups_of(dataset) for name, dataset in self._datasets.items()}

    def _groups_of(self, dataset: PromptDataset) -> list[list[Sample]]:
        groups = []
        for group_index, prompt in enumerate(dataset):
            group = [copy.deepcopy(prompt) for _ in range(self._samples_per_prompt)]
            for member, sample in enumerate(group):
                sample.group_index = group_index
                sample.index = group_index * self._samples_per_prompt + member
            groups.append(group)
        return groups
