"""Prompts, batch sizes and micro-batches."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from miles.config.paths import InputFile, PromptFile
from miles.config.section import Section


def _one_is_a_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class DataConfig(Section):
    title: ClassVar[str] = "Data and batches"

    prompt_data: Annotated[list[PromptFile] | None, BeforeValidator(_one_is_a_list)] = Field(
        None,
        description="Prompts to train on: .jsonl or .parquet files, or FILE@[a:b] for some of a file's rows. Required "
        "without --data-source-path.",
    )
    prompt_data_weights: list[float] | None = Field(
        None,
        description="Shares of the files in the prompts, one a file, of any sum. Unset: every prompt once an epoch.",
    )
    input_key: str = Field("input", description="Column with the prompt: a text, or a list of chat messages.")
    label_key: str | None = Field(None, description="Column with the right answer.")
    metadata_key: str = Field("metadata", description="Column with an object that is handed to the reward.")
    tool_key: str = Field(
        "tools", description="Column with tools, a list or its JSON, that the chat template offers to the model."
    )
    apply_chat_template: bool = Field(False, description="Render the prompt with the tokenizer's chat template.")
    chat_template_path: InputFile | None = Field(None, description="Jinja file to render with. Unset: the tokenizer's.")
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the chat template."
    )
    num_rollout: int | None = Field(
        None, ge=0, description="Rollouts (generate, then train) of the whole run; 0: only evaluate."
    )
    num_epoch: int | None = Field(
        None, gt=0, description="Passes over the prompts, instead of --num-rollout: give exactly one of the two."
    )
    rollout_batch_size: int = Field(gt=0, description="Prompts of one rollout.")
    n_samples_per_prompt: int = Field(1, gt=0, description="Responses sampled for each prompt: the group size.")
    global_batch_size: int | None = Field(
        None,
        gt=0,
        description="Samples of one optimizer step; pieces of one trajectory count once. The last step of a rollout "
        "takes what is left. Unset: a whole rollout, or as --num-steps-per-rollout says.",
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
    balance_data: bool = Field(
        False,
        description="Deal the samples of a step to the data-parallel ranks by tokens, not in turn. Always so with "
        "--use-dynamic-batch-size.",
    )
    balance_by_flops: bool = Field(
        False,
        description="Balance by the work of a forward pass, which grows faster than the tokens. With "
        "--use-dynamic-batch-size.",
    )
    rollout_shuffle: bool = Field(False, description="Shuffle the prompts anew in every epoch.")
    rollout_seed: int = Field(42, ge=0, description="Seed of the shuffle.")
    rollout_max_prompt_len: int | None = Field(
        None,
        gt=0,
        description="Most tokens of a prompt; longer ones are left out. Never more than one less than "
        "--rollout-max-context-len.",
    )
    start_rollout_id: int | None = Field(
        None, ge=0, description="Number of the first rollout. Unset: the one after the loaded checkpoint's, else 0."
    )
    data_pad_size_multiplier: int = Field(
        128,
        gt=0,
        description="A packed micro-batch is padded to a multiple of this many tokens, times the tensor-parallel size.",
    )
