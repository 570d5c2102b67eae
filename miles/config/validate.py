"""What a configuration must satisfy. Each rule says what was given, what is allowed and what to do."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from miles.config.engine_rules import ENGINE_RULES, engine_warnings
from miles.config.layout_rules import LAYOUT_RULES
from miles.config.megatron_rules import MEGATRON_RULES
from miles.config.offload_rules import OFFLOAD_RULES, offload_warnings
from miles.config.values import Undetermined, Values
from miles.config.weight_sync import WEIGHT_SYNC_RULES

Rule = Callable[[Values], Iterator[str]]
RULES: list[Rule] = [*OFFLOAD_RULES, *LAYOUT_RULES, *MEGATRON_RULES, *ENGINE_RULES, *WEIGHT_SYNC_RULES]


def _rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def validate(v: Values) -> list[str]:
    """Every problem of a configuration; a rule that reads a value which is not known has nothing to say."""
    problems = []
    for rule in RULES:
        try:
            problems += rule(v)
        except Undetermined:
            continue
    return problems


def warn(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    if v.use_kl_loss and v.kl_loss_type == "k1" and v.kl_loss_coef > 0:
        yield "--kl-loss-type k1 as a loss has a gradient of zero on average; k3 and low_var_kl pull to the reference"
    if v.ref_load is not None and not v.use_kl_loss:
        yield "--ref-load has no effect without --use-kl-loss"
    if v.eval_prompt_data and v.eval_interval is None:
        yield "--eval-prompt-data is never used: --eval-interval is not given"
    if v.lr == 0 and v.needs_trainer:
        yield "--lr 0: the weights will not change"
    yield from offload_warnings(v)
    yield from engine_warnings(v)


# --- layout ---


@_rule
def _debug_modes(v: Values) -> Iterator[str]:
    if v.debug_rollout_only and not v.needs_engines:
        other = "--debug-train-only" if v.debug_train_only else "--loss-type sft_loss"
        yield f"--debug-rollout-only starts no trainer and {other} starts no engine: nothing is left to run; drop one"
    if v.debug_train_only and v.loss_type == "policy_loss":
        yield (
            "--debug-train-only starts no engine, but policy_loss learns from engines' samples; use --loss-type "
            "sft_loss"
        )


@_rule
def _node_size(v: Values) -> Iterator[str]:
    if v.needs_trainer and v.actor_num_gpus_per_node > v.num_gpus_per_node:
        yield (
            f"--actor-num-gpus-per-node {v.actor_num_gpus_per_node} does not fit on a node of --num-gpus-per-node "
            f"{v.num_gpus_per_node}; lower the first or correct the second"
        )


# --- model ---


def _folder_problem(flag: str, folder: str) -> str | None:
    if not Path(folder).is_dir():
        return f"{flag} {folder} is not a folder here; download the model first, for example with `hf download`"
    if not (Path(folder) / "config.json").is_file():
        return f"{flag} {folder} has no config.json: it is not a Hugging Face checkpoint"
    return None


@_rule
def _checkpoint_folder(v: Values) -> Iterator[str]:
    if problem := _folder_problem("--hf-checkpoint", v.hf_checkpoint):
        yield problem


@_rule
def _reference_folder(v: Values) -> Iterator[str]:
    if v.use_kl_loss and v.ref_load != v.hf_checkpoint:
        if problem := _folder_problem("--ref-load", v.ref_load):
            yield problem


@_rule
def _model_shape(v: Values) -> Iterator[str]:
    if _folder_problem("", v.hf_checkpoint):
        return
    file = Path(v.hf_checkpoint) / "config.json"
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"{file} is not valid JSON: {error}"


# --- data and batches ---


def _prompt_file_problem(flag: str, path: str) -> str | None:
    if Path(path).suffix not in (".jsonl", ".parquet"):
        return f"{flag} {path} must be a .jsonl or .parquet file"
    if not Path(path).is_file():
        return f"{flag} {path} is no file here; relative paths start at the working directory {Path.cwd()}"
    return None


@_rule
def _prompts(v: Values) -> Iterator[str]:
    if v.prompt_data is None:
        yield "--prompt-data is required: a .jsonl or .parquet file with the prompts"
    elif problem := _prompt_file_problem("--prompt-data", v.prompt_data):
        yield problem


@_rule
def _length_of_run(v: Values) -> Iterator[str]:
    if (v.num_rollout is None) == (v.num_epoch is None):
        given = "neither is" if v.num_rollout is None else f"both are ({v.num_rollout} and {v.num_epoch})"
        yield f"exactly one of --num-rollout and --num-epoch must be given, {given}"


@_rule
def _steps(v: Values) -> Iterator[str]:
    samples, size, steps = v.samples_per_rollout, v.global_batch_size, v.num_steps_per_rollout
    counted = f"{samples} samples a rollout (--rollout-batch-size {v.rollout_batch_size} x --n-samples-per-prompt "
    counted += f"{v.n_samples_per_prompt})"
    if steps is not None and samples % steps:
        yield f"{counted} cannot be divided into --num-steps-per-rollout {steps} steps; choose a divisor of {samples}"
    elif samples % size:
        yield f"{counted} cannot be divided into steps of --global-batch-size {size}; choose a divisor of {samples}"
    elif steps is not None and size * steps != samples:
        yield (
            f"--global-batch-size {size} x --num-steps-per-rollout {steps} is {size * steps}, not the {counted}; "
            "leave one of the two out"
        )
    elif v.needs_trainer and v.data_parallel_size and size % v.data_parallel_size:
        yield (
            f"--global-batch-size {size} cannot be dealt equally to {v.data_parallel_size} data-parallel ranks; choose "
            f"a multiple of {v.data_parallel_size}"
        )


@_rule
def _dynamic_batch(v: Values) -> Iterator[str]:
    if v.use_dynamic_batch_size and v.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the tokens of one micro-batch"
    if v.max_tokens_per_gpu is not None and not v.use_dynamic_batch_size:
        yield (
            f"--max-tokens-per-gpu {v.max_tokens_per_gpu} has no effect without --use-dynamic-batch-size; add that, or "
            "drop it"
        )


# --- rollout and reward ---


@_rule
def _lengths(v: Values) -> Iterator[str]:
    if v.needs_engines and v.rollout_max_response_len is None:
        yield "--rollout-max-response-len is required: the most tokens of a response"
    context, prompt = v.rollout_max_context_len, v.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        yield (
            f"--rollout-max-prompt-len {prompt} leaves no room for a response within --rollout-max-context-len "
            f"{context}; at most {context - 1} is allowed"
        )


@_rule
def _sampling(v: Values) -> Iterator[str]:
    if v.rollout_temperature == 0 and v.needs_engines and v.needs_trainer:
        yield (
            "--rollout-temperature 0 cannot be trained on: the trainer divides its logits by it, and all samples of a "
            "group would be equal; use 1.0 (--eval-temperature 0 evaluates greedily)"
        )
    if v.rollout_top_k == 0 or v.eval_top_k == 0:
        yield "--rollout-top-k and --eval-top-k are at least 1, or -1 for all tokens; 0 was given"


@_rule
def _reward(v: Values) -> Iterator[str]:
    if not v.needs_engines:
        return
    if (v.rm_type is None) == (v.custom_rm_path is None):
        given = "neither is" if v.rm_type is None else f"both are ({v.rm_type} and {v.custom_rm_path})"
        yield f"exactly one of --rm-type and --custom-rm-path must be given, {given}"
    if v.custom_rm_path is not None:
        parts = v.custom_rm_path.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            yield f"--custom-rm-path {v.custom_rm_path} must be the dotted path of a function, such as my_module.reward"


@_rule
def _labels(v: Values) -> Iterator[str]:
    if v.label_key is not None:
        return
    if v.loss_type == "sft_loss":
        yield "--loss-type sft_loss needs --label-key, the column with the text to learn"
    elif v.rm_type is not None and v.needs_engines:
        yield f"--rm-type {v.rm_type} needs --label-key, the column with the right answer"


# --- algorithm and optimizer ---


@_rule
def _groups(v: Values) -> Iterator[str]:
    learns = v.needs_engines and v.needs_trainer
    if learns and v.n_samples_per_prompt == 1 and not v.disable_rewards_normalization:
        yield (
            "--n-samples-per-prompt 1 with group-normalised rewards: a response has nothing to be compared with, every "
            "advantage is 0 and nothing is learned; give at least 2, or --disable-rewards-normalization"
        )


@_rule
def _kl(v: Values) -> Iterator[str]:
    if v.kl_loss_coef > 0 and not v.use_kl_loss:
        yield f"--kl-loss-coef {v.kl_loss_coef} has no effect without --use-kl-loss; add or drop it"


@_rule
def _schedule(v: Values) -> Iterator[str]:
    if v.lr_decay_iters is not None and v.lr_warmup_iters >= v.lr_decay_iters:
        yield f"--lr-warmup-iters {v.lr_warmup_iters} must be less than --lr-decay-iters {v.lr_decay_iters}"
    if v.min_lr > v.lr:
        yield f"--min-lr {v.min_lr} must not be above --lr {v.lr}"


# --- evaluation and checkpoints ---


@_rule
def _evaluation(v: Values) -> Iterator[str]:
    data = v.eval_prompt_data
    if v.eval_interval is not None and not data:
        yield f"--eval-interval {v.eval_interval} needs --eval-prompt-data NAME FILE"
    if v.eval_interval is not None and not v.needs_engines:
        yield f"--eval-interval {v.eval_interval} needs engines, and none runs in this layout; leave it out"
    if not data:
        return
    names, files = data[::2], data[1::2]
    if len(data) % 2:
        yield f"--eval-prompt-data takes pairs NAME FILE, got {len(data)} values: {' '.join(data)}"
        return
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"--eval-prompt-data has the name {name} more than once; name each file differently"
    for file in files:
        if problem := _prompt_file_problem("--eval-prompt-data", file):
            yield problem
    if v.rm_type is not None and v.eval_label_key is None:
        yield f"--rm-type {v.rm_type} needs --eval-label-key (or --label-key) for --eval-prompt-data"


@_rule
def _checkpoints(v: Values) -> Iterator[str]:
    if v.save_interval is not None and v.save is None:
        yield f"--save-interval {v.save_interval} needs --save, the folder of the checkpoints"
    if v.ckpt_step is not None and v.load is None:
        yield f"--ckpt-step {v.ckpt_step} needs --load, the folder that holds it"
    if v.no_load_optim and v.load is None:
        yield "--no-load-optim has no effect without --load; drop it"
    if v.save_hf is not None and set("{}") & set(v.save_hf.replace("{rollout_id}", "")):
        yield f"--save-hf {v.save_hf}: the only thing in braces may be {{rollout_id}}"
