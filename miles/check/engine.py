"""What an engine has on each of its GPUs: weights, the pool of keys and values, graphs, and room to compute in.

How SGLang shares a GPU out is in its `server_args.py` (`_handle_gpu_memory_settings`) and
`model_runner_kv_cache_mixin.py` (`_profile_available_bytes`), version 0.5.15.
"""

from dataclasses import dataclass
from typing import Any

from miles.check.parameters import Model
from miles.config import RunConfig
from miles.config.context_length import number_of_tokens

MIB = 2**20
# A process's CUDA context and libraries. Measured of a trainer before its first step (sleep_wake.json); an engine's is
# taken to be the same.
CONTEXT = 1.4e9
FP8_WEIGHT = 1 + 4 / 128**2  # bytes of a weight in FP8, with its part of a block's float32 scale
PREFILL_GRAPHS = 60 * 8 * MIB  # SGLang's estimate of its graphs for prefill


@dataclass(frozen=True)
class EngineBytes:
    """On one GPU of an engine; `tokens` of the whole engine fit into its pool."""

    weights: float
    kv_pool: float
    graphs: float
    activations: float
    tokens: int


def kv_bytes_per_token(model: Model, tensor: int, itemsize: int = 2) -> float:
    """Bytes of keys and values of one token on each GPU of an engine; a latent is whole on each."""
    fields, shape = model.shape.fields, model.shape
    layers = sum(shape.attends(layer) for layer in range(fields["num_hidden_layers"]))
    if shape.is_latent:
        return itemsize * layers * (fields["kv_lora_rank"] + fields["qk_rope_head_dim"])
    heads = fields.get("num_key_value_heads") or fields["num_attention_heads"]
    return itemsize * layers * 2 * max(1, heads // tensor) * shape.head_dim


def engine_bytes(config: RunConfig, model: Model, memory: float) -> EngineBytes:
    """An engine that starts on empty GPUs of `memory` bytes each.

    Without --sglang-mem-fraction-static SGLang keeps back what it thinks that it needs to compute; the rest of the
    memory, weights taken off, is the pool.
    """
    sglang, tensor = config.sglang, config.engine_tp_size
    attention = tensor // (sglang.get("dp_size", 1) if sglang.get("enable_dp_attention") else 1)
    chunk, batch = _sizes(memory, tensor)
    chunk = _number(sglang, "chunked_prefill_size") or chunk
    batch = _number(sglang, "cuda_graph_max_bs_decode") or batch
    graphs = 0.0 if sglang.get("disable_cuda_graph") else 2 * MIB * batch + PREFILL_GRAPHS
    fraction = sglang.get("mem_fraction_static")
    if fraction is None:
        work = 512 * MIB + 1.5 * MIB * max(chunk, 2048) + tensor * 128 * MIB
        fraction = 1 - max(work + graphs, _least_reserved(memory)) / memory
    itemsize = 4 if sglang.get("dtype") in ("float32", "float") or not config.bf16 else 2
    weights = itemsize * model.engine_part(tensor, attention)
    if config.rollout_fp8:
        # Norms and routers stay as they are too, and are too few to count.
        weights -= (itemsize - FP8_WEIGHT) * (model.engine_part(tensor, attention) - _embeddings(model) / tensor)
    pool = (memory - CONTEXT) * fraction - weights
    narrow = str(sglang.get("kv_cache_dtype")).startswith("fp8")
    per_token = kv_bytes_per_token(model, attention, 1 if narrow else 2)
    most = _number(sglang, "max_total_tokens")
    if most is not None:
        pool = min(pool, most * per_token)
    return EngineBytes(
        weights=weights,
        kv_pool=pool,
        graphs=graphs,
        activations=_activations(model, chunk, batch, tensor),
        tokens=int(max(pool, 0) / per_token),
    )


def _embeddings(model: Model) -> int:
    """Parameters of the embedding, and of an output layer of its own."""
    fields = model.shape.fields
    return fields["vocab_size"] * fields["hidden_size"] * (1 if fields.get("tie_word_embeddings") else 2)


def _number(sglang: dict[str, Any], name: str) -> int | None:
    """A size that SGLang takes with a unit, such as 8k; None where it is not given, or is to be none."""
    given = sglang.get(name)
    number = None if given is None else number_of_tokens(given)
    return number if number is not None and number > 0 else None


def _sizes(memory: float, tensor: int) -> tuple[int, int]:
    """SGLang's choices by memory: tokens of a prefill, and the largest batch with a graph."""
    gib = memory / 2**30
    if gib < 60:
        return 4096, 32 if tensor < 4 else 160
    if gib < 160:
        return 8192, 256 if tensor < 4 else 512
    return 16384, 512


def _least_reserved(memory: float) -> float:
    return 10 * 2**30 if memory > 60 * 2**30 else 0.0


def _activations(model: Model, chunk: int, batch: int, tensor: int) -> float:
    """Of a prefill's widest layer, and of the logits of a batch in float32 with the copy that is sampled from."""
    fields = model.shape.fields
    layers = range(fields["num_hidden_layers"])
    width = max(3 * model.shape.mlp_width(layer) / tensor for layer in layers) + 6 * fields["hidden_size"]
    return 2 * chunk * width + 2 * 4 * batch * fields["vocab_size"]
