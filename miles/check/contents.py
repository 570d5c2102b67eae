"""What each party's regions hold on one GPU, and what a phase takes beside them."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from miles.check.activations import Recompute, head_bytes, layer_bytes, micro_batches_in_flight, stage_bytes
from miles.check.engine import CONTEXT, EngineBytes
from miles.check.parameters import Model, Stage, expert_data_ranks
from miles.config import RunConfig
from miles.config.context_length import longest_context
from miles.residency.plan import Party, Region

# What a trainer's process holds of a GPU outside its regions once it has taken a step: context, libraries, compiled
# kernels. Measured asleep (sleep_wake.json).
TRAINER_CONTEXT = 2.7e9
# What cuBLAS works in, and small tensors: what measured peaks have beyond what is counted (train_step.json).
WORKSPACE = 0.1e9
# An NCCL group of several GPUs, once it has been used. Not measured here.
GROUP_BYTES = 0.4e9
# Of a prompt where --rollout-max-prompt-len is not given.
PROMPT_TOKENS = 1024
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2 + 4 / 256, "fp16": 2 + 4 / 256, "fp8e4m3": 1 + 4 / 256, "fp8e5m2": 1 + 4 / 256}
STREAM_PARTS = 3  # of the chunk that a streamed optimizer goes through; one is on the GPU


class Item(StrEnum):
    """The lines of a ledger."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    MASTERS = "masters"
    MOMENTS = "moments"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    ENGINE_WEIGHTS = "engine weights"
    KV_POOL = "KV pool"
    GRAPHS = "CUDA graphs"
    ENGINE_WORK = "engine activations"
    BUCKETS = "sync buckets"
    COMMUNICATION = "communication buffers"
    CONTEXT = "contexts and libraries"


type Bytes = dict[Item, float]


@dataclass(frozen=True)
class Work:
    """One micro-batch of the trainer, and how many a step has on each rank.

    Args:
        tokens: on one context-parallel rank. responses: those that are scored.
        longest: tokens of the longest sample.
        micro_batches: of a step on each data-parallel rank.
        assumed: what was taken for granted, in a sentence; empty if all is given.
    """

    tokens: int
    responses: int
    longest: int
    micro_batches: int
    assumed: str


def work_of(config: RunConfig) -> Work:
    """The largest micro-batch that the flags allow: every sample as long as it may be."""
    assumed = ""
    context = config.rollout_max_context_len or longest_context(config)  # type: ignore[arg-type]
    prompt, response = config.rollout_max_prompt_len, config.rollout_max_response_len
    if response is None:
        assert context is not None
        longest = response = context
    elif prompt is None or "rollout_max_prompt_len" not in config.given:
        longest = min(PROMPT_TOKENS + response, context or PROMPT_TOKENS + response)
        assumed = f"prompts of {PROMPT_TOKENS:,} tokens, for --rollout-max-prompt-len is not given"
    else:
        longest = min(prompt + response, context or prompt + response)
    assert config.global_batch_size is not None, "it is derived where it is not given"
    samples = -(config.global_batch_size // -config.data_parallel_size)
    if config.use_dynamic_batch_size:
        assert config.max_tokens_per_micro_batch is not None and config.max_tokens_per_gpu is not None
        per_rank = config.max_tokens_per_gpu
        count = -(samples * longest // -config.max_tokens_per_micro_batch)
    else:
        held = min(config.micro_batch_size, samples)
        per_rank = -(held * longest // -config.context_parallel_size)
        count = -(samples // -config.micro_batch_size)
    # Log-probabilities are computed of every rank's part of the sequences.
    responses = min(per_rank, -(per_rank * response // -longest))
    return Work(per_rank, responses, longest, max(count, config.least_micro_batches), assumed)


@dataclass(frozen=True)
class Contents:
    """On one GPU: what each region holds, and what phases add.

    Args:
        regions: by party and region.
        always: what stays of each party's process.
        train: the activation peak of a step of the actor, and of the critic.
        generate: what an engine computes in.
        sync: the buckets of a weight sync.
    """

    regions: dict[tuple[Party, Region], Bytes]
    always: dict[Party, Bytes]
    train: dict[Party, Bytes]
    generate: Bytes
    sync: Bytes


def contents_of(config: RunConfig, model: Model, stage: int | None, engine: EngineBytes | None, work: Work) -> Contents:
    """A GPU with a trainer's rank of pipeline `stage` (None: without one) and a rank of `engine` (None: without)."""
    regions: dict[tuple[Party, Region], Bytes] = {}
    always: dict[Party, Bytes] = {}
    train: dict[Party, Bytes] = {}
    sync: Bytes = {}
    if stage is not None:
        trainers = [Party.ACTOR, *([Party.CRITIC] if config.use_critic else [])]
        for party in trainers:
            held = model.stages[stage]
            if party is Party.CRITIC and held.last:
                held = _with_value_head(held, model, config)
            regions |= {(party, region): content for region, content in trainer_regions(config, held).items()}
            always[party] = {Item.CONTEXT: TRAINER_CONTEXT}
            train[party] = train_peak(config, model, stage, work, party)
        sync = {Item.BUCKETS: sync_bytes(config, model)}
    if engine is not None:
        regions |= {
            (Party.ENGINE, Region.WEIGHTS): {Item.ENGINE_WEIGHTS: engine.weights},
            (Party.ENGINE, Region.KV_CACHE): {Item.KV_POOL: max(engine.kv_pool, 0.0)},
            (Party.ENGINE, Region.CUDA_GRAPH): {Item.GRAPHS: engine.graphs},
        }
        groups = GROUP_BYTES if config.rollout_num_gpus_per_engine > 1 else 0.0
        always[Party.ENGINE] = {Item.CONTEXT: CONTEXT, Item.COMMUNICATION: groups}
        if stage is None:
            # A remote engine receives bucket by bucket.
            sync = {Item.BUCKETS: float(config.update_weight_buffer_size)}
    generate = {Item.ENGINE_WORK: engine.activations} if engine is not None else {}
    return Contents(regions, always, train, generate, sync)


def _with_value_head(stage: Stage, model: Model, config: RunConfig) -> Stage:
    """A critic's last stage has a value for each channel in the place of the output layer."""
    fields = model.shape.fields
    rows = -(fields["vocab_size"] // -config.tensor_model_parallel_size)
    # With a single stage a tied output layer is the embedding, which stays.
    if fields.get("tie_word_embeddings") and config.pipeline_model_parallel_size == 1:
        return stage
    return replace(stage, dense=stage.dense - (rows - 1) * fields["hidden_size"] + 1)


def trainer_regions(config: RunConfig, stage: Stage) -> dict[Region, Bytes]:
    """What a trainer's regions hold on one rank.

    Weights are of the model's type, gradients float32 unless --no-accumulate-allreduce-grads-in-fp32, masters and
    moments float32 and, with --use-distributed-optimizer, shared out over the ranks that have the same parameters.
    """
    sizes = config.parallel_sizes
    item = 2 if config.bf16 else 4
    shared = optimizer_share(config, stage)
    groups = [sizes.tp, sizes.pp, sizes.cp, sizes.dp * sizes.cp, sizes.ep, config.world_size]
    return {
        Region.WEIGHTS: {Item.WEIGHTS: float(item * stage.parameters)},
        Region.GRADS: {
            Item.GRADIENTS: float((4 if config.accumulate_allreduce_grads_in_fp32 else item) * stage.parameters)
        },
        Region.OPTIMIZER: {Item.MASTERS: 4.0 * shared if config.bf16 else 0.0, Item.MOMENTS: 8.0 * shared},
        Region.COMM: {Item.COMMUNICATION: GROUP_BYTES * sum(size > 1 for size in groups)},
    }


def optimizer_share(config: RunConfig, stage: Stage) -> float:
    """Parameters of which one rank has the optimizer's state."""
    if not config.use_distributed_optimizer:
        return float(stage.parameters)
    sizes = config.parallel_sizes
    return stage.dense / (sizes.dp * sizes.cp) + stage.experts / expert_data_ranks(config)


def recompute_of(config: RunConfig) -> Recompute:
    """The flags of recomputation in one object."""
    return Recompute(
        config.recompute_granularity,
        config.recompute_method,
        config.recompute_num_layers or 1,
        tuple(config.recompute_modules or ("core_attn",)),
    )


def train_peak(config: RunConfig, model: Model, stage: int, work: Work, party: Party = Party.ACTOR) -> Bytes:
    """Activations and logits at the highest point of a training step on a rank of this stage."""
    sizes, held, item = config.parallel_sizes, model.stages[stage], model.traits.itemsize
    layers = [[layer_bytes(model.shape, layer, sizes, model.traits) for layer in chunk] for chunk in held.chunks]
    kept = stage_bytes(layers, recompute_of(config))
    flight = micro_batches_in_flight(stage, sizes.pp, len(held.chunks), work.micro_batches)
    activations = kept.kept * work.tokens * flight + WORKSPACE
    moment = kept.moment * work.tokens + item * held.largest
    hidden, states, logits = model.shape.fields["hidden_size"], 0.0, 0.0
    if held.last:
        rows = 1 if party is Party.CRITIC else -(model.shape.fields["vocab_size"] // -sizes.tp)
        states, logits = head_bytes(hidden, rows, work.tokens, work.responses, config.log_probs_chunk_size, item)
    staged = 0.0
    if config.stream_optimizer_state_to_disk:
        # In the optimizer's step, when activations are gone.
        staged = max(0.0, config.offload_train_disk_chunk_mb * 2**20 / STREAM_PARTS - activations)
    # The output layer goes first: what it takes is gone before the last layer's gradients come.
    if states + logits >= moment:
        return {Item.ACTIVATIONS: activations + states + staged, Item.LOGITS: logits}
    return {Item.ACTIVATIONS: activations + moment + staged, Item.LOGITS: 0.0}


def sync_bytes(config: RunConfig, model: Model) -> float:
    """Two buckets of one size, or one that holds all, or the largest tensor; see `miles.weight_sync.plan`."""
    item, bucket = model.traits.itemsize, config.update_weight_buffer_size
    total, largest = item * model.parameters, item * model.largest
    return float(total if total <= bucket else max(2 * bucket, largest))


def moment_bytes(config: Any) -> float:
    """Bytes of one moment of one parameter in a streamed optimizer's file."""
    return MOMENT_BYTES[config.stream_optimizer_state_moment_dtype]
