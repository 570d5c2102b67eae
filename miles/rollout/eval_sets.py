"""Evaluation sets: held-out prompts, each set with its own way to sample and to reward."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from miles.config import RunConfig
from miles.config.eval_config import EvalSetConfig, eval_set_configs
from miles.rollout.generate import Sampling
from miles.rollout.prompts.data_source import PromptDataset
from miles.rollout.prompts.prompt_format import PromptFormat
from miles.utils.errors import UserError
from miles.utils.json_values import as_json
from miles.utils.types import Sample


@dataclass(frozen=True)
class EvalSet:
    """One set.

    Attributes:
        prompts: read again for each evaluation.
        samples_per_prompt: responses sampled for each.
        sampling: how they are drawn.
        generate_path: dotted path of the function that generates a sample; None: Miles' own does.
        metadata: entries laid over each row's.
    """

    name: str
    prompts: PromptDataset
    samples_per_prompt: int
    sampling: Sampling
    generate_path: str | None
    metadata: dict[str, Any]

    def groups(self) -> list[list[Sample]]:
        """New samples, a group a prompt, with indices that count from 0 in this set alone."""
        groups = []
        for group_index, prompt in enumerate(self.prompts):
            prompt.metadata.update(self.metadata)
            group = [copy.deepcopy(prompt) for _ in range(self.samples_per_prompt)]
            for index, sample in enumerate(group, group_index * self.samples_per_prompt):
                sample.group_index, sample.index = group_index, index
            groups.append(group)
        return groups


def load_eval_sets(config: RunConfig, tokenizer: Any) -> list[EvalSet]:
    """The sets of --eval-prompt-data or --eval-config, read and checked.

    Raises:
        ValueError: a set is described wrongly, or its prompts are unusable.
    """
    entries, problems = eval_set_configs(config.eval_prompt_data, config.eval_config)
    if problems:
        raise UserError("; ".join(problems))
    return [_load(config, tokenizer, entry) for entry in entries]


def _load(config: RunConfig, tokenizer: Any, entry: EvalSetConfig) -> EvalSet:
    metadata = as_json(entry.metadata_overrides, f"evaluation set {entry.name}: metadata_overrides") | (
        {} if entry.rm_type is None else {"rm_type": entry.rm_type}
    )
    form = PromptFormat.from_config(
        config,
        input_key=entry.given("input_key", config.eval_input_key),
        label_key=entry.given("label_key", config.eval_label_key),
    )
    form = dataclasses.replace(
        form,
        tool_key=entry.given("tool_key", config.eval_tool_key),
        metadata_key=entry.given("metadata_key", config.metadata_key),
        # Also where training has none of its own: the sets name theirs.
        built_in_rewards=config.custom_rm_path is None,
        metadata_overrides=metadata,
    )
    limits = [] if config.eval_max_prompt_len is None else [config.eval_max_prompt_len]
    if config.eval_max_context_len is not None:
        limits.append(config.eval_max_context_len - 1)  # room for a token
    return EvalSet(
        name=entry.name,
        prompts=PromptDataset(entry.path, tokenizer, form, min(limits, default=None)),
        samples_per_prompt=entry.given("n_samples_per_eval_prompt", config.n_samples_per_eval_prompt),
        sampling=Sampling(
            temperature=entry.given("temperature", config.eval_temperature),
            top_p=entry.given("top_p", config.eval_top_p),
            top_k=entry.given("top_k", config.eval_top_k),
            max_response_len=entry.given("max_response_len", config.eval_max_response_len),
            max_context_len=config.eval_max_context_len,
            stop=entry.given("stop", config.rollout_stop),
            stop_token_ids=entry.given("stop_token_ids", config.rollout_stop_token_ids),
            min_new_tokens=entry.given("min_new_tokens", config.eval_min_new_tokens),
            seed=f"eval {entry.name} {config.seed}",
        ),
        generate_path=entry.given("custom_generate_function_path", config.custom_generate_function_path),
        metadata=metadata,
    )
