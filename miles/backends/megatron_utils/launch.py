"""Megatron's ranks as the driver starts them."""

from miles.backends.trainer.launch import Launch
from miles.config import RunConfig


def shard_of_rank(config: RunConfig, rank: int) -> int:
    """The data-parallel number of a rank: Megatron counts tensor, context, data, pipeline."""
    ranks_of_shard = config.tensor_model_parallel_size * config.context_parallel_size
    return rank // ranks_of_shard % config.data_parallel_size


def environment(config: RunConfig) -> dict[str, str]:
    """What Megatron, NCCL and torch read as they start."""
    if config.device == "cuda":
        # Megatron needs it for overlapping communication with computation on one queue.
        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        if config.num_engines > config.num_colocated_engines:
            # As SGLang sets it in engines: the two ends of a broadcast must share memory in the same way.
            variables["NCCL_CUMEM_ENABLE"] = "0"
        if config.deterministic_mode:
            # A ring adds up in the same order each time; cuBLAS and Transformer Engine choose among their algorithms.
            variables |= {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            variables["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        return variables
    # Compiling costs minutes on a laptop and buys nothing for small tensors.
    return {"TORCH_COMPILE_DISABLE": "1"}


MEGATRON = Launch(
    actor="miles.backends.megatron_utils.actor.MegatronTrainRayActor",
    critic="miles.backends.megatron_utils.critic.MegatronCriticRayActor",
    environment=environment,
    shard_of_rank=shard_of_rank,
)
