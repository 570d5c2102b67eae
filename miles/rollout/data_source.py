"""The path of `miles.rollout.prompts.data_source` that flags and users' classes name."""

from miles.rollout.prompts.data_source import DataSource, PromptDataset, RolloutDataSource

__all__ = ["DataSource", "PromptDataset", "RolloutDataSource"]
