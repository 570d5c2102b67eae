"""What the driver learns of Megatron's ranks, without torch."""

import subprocess
import sys
from pathlib import Path

from miles.backends.megatron_utils.launch import MEGATRON
from miles.config import RunConfig

ROOT = Path(__file__).parents[4]


def run(**fields):
    return RunConfig(hf_checkpoint="m", rollout_batch_size=8, advantage_estimator="grpo", **fields)


def test_ranks_count_tensor_context_data_pipeline():
    config = run(
        device="cpu",
        actor_num_gpus_per_node=16,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    assert [MEGATRON.shard_of_rank(config, rank) for rank in range(16)] == ([0] * 4 + [1] * 4) * 2


def test_the_environment_is_that_of_the_device_and_of_where_engines_are():
    assert MEGATRON.environment(run(device="cpu")) == {"TORCH_COMPILE_DISABLE": "1"}
    beside = run(device="cuda", actor_num_gpus_per_node=1, rollout_num_gpus=1, colocate=True)
    assert MEGATRON.environment(beside) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    apart = run(device="cuda", actor_num_gpus_per_node=1, rollout_num_gpus=1)
    assert MEGATRON.environment(apart) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_CUMEM_ENABLE": "0"}


def test_what_is_to_give_the_same_bits_says_so_before_cuda_starts():
    assert MEGATRON.environment(run(device="cpu", deterministic_mode=True)) == {"TORCH_COMPILE_DISABLE": "1"}
    config = run(device="cuda", actor_num_gpus_per_node=1, rollout_num_gpus=1, colocate=True, deterministic_mode=True)
    assert MEGATRON.environment(config) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }


def test_the_driver_imports_no_torch_for_it():
    script = "import sys, miles.ray.train.group; assert 'torch' not in sys.modules and 'megatron' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=300)
