"""Process groups of one trainer rank: torch.distributed, then Megatron's tensor, pipeline and data groups."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from miles.backends.megatron_utils import patches, torch_adam
from miles.backends.trainer.world import join_world
from miles.config import RunConfig


def initialize(config: RunConfig, rank: int, world_size: int, master: str) -> None:
    """Join the trainer's world at `master` ("host:port") and build Megatron's groups.

    NCCL on a GPU, gloo on a CPU. Random state is seeded from --seed, differently on each tensor-parallel rank.
    """
    if config.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        # Nothing here reads what it did not write.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch_adam.install()
    patches.install(config.device)
    join_world(config, rank, world_size, master)
    build_process_groups(config)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed, inference_rng_tracker=True)


def build_process_groups(config: RunConfig) -> None:
    """Build Megatron's groups inside torch's world; all ranks call it together.

    After `parallel_state.destroy_model_parallel()` it can be called again and gives the same groups anew. It draws no
    random numbers.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_stages,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        distributed_timeout_minutes=config.distributed_timeout_minutes,
    )
