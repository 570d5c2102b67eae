"""Prompts, batch sizes and micro-batches."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from miles.config.effect import NotWith, OnlyWith, trainer_runs
from miles.config.paths import InputFile, PromptFile
from miles.config.section import Derived, Section, derives, rule, warning
from miles.config.values import Values

_TEMPLATE = OnlyWith("--apply-chat-template")
# Arguments of the tokenizer's apply_chat_template that Miles gives itself.
_TEMPLATE_ARGUMENTS = ("conversation", "tools", "chat_template", "tokenize", "add_generation_prompt")


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
    chat_template_path: Annotated[InputFile | None, _TEMPLATE] = Field(
        None, description="Jinja file to render with. Unset: the tokenizer's."
    )
    apply_chat_template_kwargs: Annotated[dict[str, Any], _TEMPLATE] = Field(
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
    micro_batch_size: Annotated[int, NotWith("--use-dynamic-batch-size", where=trainer_runs, warns=True)] = Field(
        1, gt=0, description="Samples of one forward pass, without --use-dynamic-batch-size."
    )
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
    balance_by_flops: Annotated[bool, OnlyWith("--use-dynamic-batch-size")] = Field(
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


@derives("apply_chat_template")
def _conversations(v: Values) -> Iterator[Derived]:
    if v.learns_conversations and not v.apply_chat_template:
        yield "apply_chat_template", True, "--loss-type sft_loss without --label-key: conversations"


@derives("global_batch_size", "num_steps_per_rollout")
def _steps(v: Values) -> Iterator[Derived]:
    samples, size, steps = v.samples_per_rollout, v.global_batch_size, v.num_steps_per_rollout
    if size is None:
        size = -(samples // -(steps or 1))
        reason = "one optimizer step per rollout" if steps is None else f"{samples} samples in {steps} steps"
        yield "global_batch_size", size, reason
    if steps is None:
        yield "num_steps_per_rollout", -(samples // -size), _cut(samples, size)


def _cut(samples: int, size: int) -> str:
    rest = samples % size
    if size >= samples:
        return "--global-batch-size is a whole rollout"
    return f"{samples} samples in steps of {size}" + (f", the last of {rest}" if rest else "")


@rule
def _prompts(v: Values) -> Iterator[str]:
    if not v.prompt_data and v.data_source_path is None:
        yield "--prompt-data is required: a .jsonl or .parquet file with the prompts"


@rule
def _prompt_weights(v: Values) -> Iterator[str]:
    weights, files = v.prompt_data_weights, v.prompt_data
    if weights is None or not files:
        return
    if len(weights) != len(files):
        yield f"--prompt-data-weights has {len(weights)} weights for {len(files)} files of --prompt-data; give one each"
    for weight in weights:
        if weight <= 0:
            yield f"--prompt-data-weights {weight:g} must be above 0; leave out a file that is not to be used"


@rule
def _template_arguments(v: Values) -> Iterator[str]:
    for name in _TEMPLATE_ARGUMENTS:
        if name in v.apply_chat_template_kwargs:
            yield f"--apply-chat-template-kwargs: {name} is given by Miles; drop it"


@rule
def _length_of_run(v: Values) -> Iterator[str]:
    if (v.num_rollout is None) == (v.num_epoch is None):
        given = "neither is" if v.num_rollout is None else f"both are ({v.num_rollout} and {v.num_epoch})"
        yield f"exactly one of --num-rollout and --num-epoch must be given, {given}"


@rule
def _fitting_steps(v: Values) -> Iterator[str]:
    samples, size, steps = v.samples_per_rollout, v.global_batch_size, v.num_steps_per_rollout
    counted = f"{samples} samples a rollout (--rollout-batch-size {v.rollout_batch_size} x --n-samples-per-prompt "
    counted += f"{v.n_samples_per_prompt})"
    if size > samples:
        yield f"--global-batch-size {size} is more than the {counted}; give at most {samples}"
    elif steps is not None and v.steps_per_rollout != steps:
        yield (
            f"--num-steps-per-rollout {steps} does not fit the {counted}: steps of {size} make "
            f"{v.steps_per_rollout}; choose that, or a divisor of {samples}, or leave out --global-batch-size"
        )


@rule
def _dynamic_batch(v: Values) -> Iterator[str]:
    if v.use_dynamic_batch_size and v.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the tokens of one micro-batch"


@warning
def _uneven_steps(v: Values) -> Iterator[str]:
    if not v.needs_trainer:
        return
    size, ranks = v.global_batch_size, v.data_parallel_size
    if rest := v.samples_per_rollout % size:
        yield (
            f"--global-batch-size {size}: the last of the {v.steps_per_rollout} optimizer steps of a rollout has the "
            f"{rest} samples that are left of {v.samples_per_rollout}, and weighs as much as the others"
        )
    if size < ranks:
        yield f"--global-batch-size {size} leaves some of {ranks} data-parallel ranks without a sample"
