"""Prompts, batch sizes and micro-batches."""

from typing import Any, ClassVar

from pydantic import Field

from miles.config.section import Section


class DataConfig(Section):
    title: ClassVar[str] = "Data and batches"

    prompt_data: str | None = Field(None, description="Prompts to train on: a .jsonl or .parquet file. Required.")
    input_key: str = Field("input", description="Column with the prompt: a text, or a list of chat messages.")
    label_key: str | None = Field(None, description="Column with the right answer.")
    metadata_key: str = Field("metadata", description="Column with an object that is handed to the reward.")
    apply_chat_template: bool = Field(False, description="Render the prompt with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the chat template."
    )
    num_rollout: int | None = Field(None, gt=0, description="Rollouts (generate, then train) of the whole run.")
    num_epoch: int | None = Field(
        None, gt=0, description="Passes over the prompts, instead of --num-rollout: give exactly one of the two."
    )
    rollout_batch_size: int = Field(gt=0, description="Prompts of one rollout.")
    n_samples_per_prompt: int = Field(1, gt=0, description="Responses sampled for each prompt: the group size.")
    global_batch_size: int | None = Field(
        None,
        gt=0,
        description="Samples of one optimizer step. Unset: a whole rollout, or as --num-steps-per-rollout says.",
    )
    num_steps_per_rollout: int | None = Field(
        None, gt=0, description="Optimizer steps of one rollout; the other way to say --global-batch-size."
    )
    micro_batch_size: int = Field(1, gt=0, description="Samples of one forward pass, without --use-dynamic-batch-size.")
    use_dynamic_batch_size: bool = Field(
        False, description="Fill each micro-batch up to --max-tokens-per-gpu tokens instead of counting samples."
    )
    max_tokens_per_gpu: int | None = Field(
        None,
        gt=0,
        description="Tokens of one micro-batch, times --context-parallel-size. Needed by --use-dynamic-batch-size.",
    )
    rollout_shuffle: bool = Field(False, description="Shuffle the prompts anew in every epoch.")
    rollout_seed: int = Field(42, ge=0, description="Seed of the shuffle.")
    rollout_max_prompt_len: int | None = Field(
        None,
        gt=0,
        description="Longest prompt allowed, in tokens. Unset: one less than --rollout-max-context-len, if given.",
    )
    start_rollout_id: int | None = Field(
        None, ge=0, description="Number of the first rollout. Unset: the one after the loaded checkpoint's, else 0."
    )
    data_pad_size_multiplier: int = Field(
        128,
        gt=0,
        description="A packed micro-batch is padded to a multiple of this many tokens, times the tensor-parallel size.",
    )
