import os
import sys

import pytest

from miles.backends.sglang_utils.arguments import (
    CPU_MEMORY_SAVER,
    command_line,
    server_arguments,
    server_environment,
)
from miles.utils.arguments import parse_args


def test_cpu_arguments_and_the_users_win(engine_flags):
    config = parse_args([*engine_flags, "--sglang-max-running-requests", "16", "--sglang-log-level", "info"])
    arguments = server_arguments(config, engine_rank=2, port=5000, nccl_port=5001)
    assert arguments["device"] == "cpu" and arguments["dtype"] == "float32"
    assert arguments["host"] == "127.0.0.1" and arguments["port"] == 5000
    assert arguments["random_seed"] == config.seed + 2
    assert arguments["max_running_requests"] == 16 and arguments["log_level"] == "info"


def test_gpu_arguments_leave_sglang_its_defaults(engine_flags):
    config = parse_args(["cuda" if flag == "cpu" else flag for flag in engine_flags])
    arguments = server_arguments(config, engine_rank=0, port=5000, nccl_port=5001)
    assert arguments["dtype"] == "bfloat16"
    assert not {"device", "attention_backend", "mem_fraction_static", "max_total_tokens"} & arguments.keys()


@pytest.mark.parametrize("offload", [True, False])
def test_memory_that_leaves_a_gpu(engine_flags, offload):
    flags = ["cuda" if flag == "cpu" else flag for flag in engine_flags]
    config = parse_args([flag for flag in flags if flag != "--no-offload-rollout" or not offload])
    arguments = server_arguments(config, engine_rank=0, port=5000, nccl_port=5001)
    assert ("--enable-memory-saver" in command_line(arguments)) == offload
    assert arguments["cuda_graph_backend_prefill"] == "disabled"
    environment = server_environment(config, engine_rank=0, gpu_ids=[0], grpc_port=5)
    assert ("SGLANG_MEMORY_SAVER_CUDA_GRAPH" in environment) == offload
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert CPU_MEMORY_SAVER not in environment


def test_the_users_prefill_graphs_win(engine_flags):
    flags = ["cuda" if flag == "cpu" else flag for flag in engine_flags]
    config = parse_args([*flags, "--sglang-cuda-graph-backend-prefill", "breakable"])
    arguments = server_arguments(config, engine_rank=0, port=5000, nccl_port=5001)
    assert arguments["cuda_graph_backend_prefill"] == "breakable"


@pytest.mark.parametrize("offload", [True, False])
def test_memory_that_leaves_a_cpu(engine_flags, offload):
    config = parse_args([flag for flag in engine_flags if flag != "--no-offload-rollout" or not offload])
    # SGLang's own saver ends the server on a CPU.
    assert "enable_memory_saver" not in server_arguments(config, engine_rank=0, port=5000, nccl_port=5001)
    environment = server_environment(config, engine_rank=0, gpu_ids=[], grpc_port=5)
    assert (CPU_MEMORY_SAVER in environment) == offload


def test_command_line():
    command = command_line(
        {
            "model_path": "m",
            "skip_server_warmup": True,
            "enable_lora": False,
            "max_lora_rank": None,
            "lora_paths": [1, 2],
        }
    )
    words = "-m miles.backends.sglang_utils.gpu_server --model-path m --skip-server-warmup --lora-paths 1 2"
    assert command == [sys.executable, *words.split()]


def test_cpu_environment(engine_flags, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    config = parse_args(engine_flags)
    environment = server_environment(config, engine_rank=0, gpu_ids=[], grpc_port=5)
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1" and environment["OMP_NUM_THREADS"] == "3"
    assert "PYTHONDONTWRITEBYTECODE" not in environment and "SGLANG_CPU_OMP_THREADS_BIND" not in environment

    two = config.model_copy(update={"rollout_num_gpus_per_engine": 2, "rollout_num_gpus": 2})
    environment = server_environment(two, engine_rank=0, gpu_ids=[], grpc_port=5)
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0,2|1,3" and environment["OMP_NUM_THREADS"] == "1"

    eight = config.model_copy(update={"rollout_num_gpus_per_engine": 8, "rollout_num_gpus": 8})
    with pytest.raises(ValueError, match="needs 8 CPU cores.*may use 4"):
        server_environment(eight, engine_rank=0, gpu_ids=[], grpc_port=5)


def test_gpu_environment(engine_flags):
    config = parse_args(["cuda" if flag == "cpu" else flag for flag in engine_flags])
    environment = server_environment(config, engine_rank=0, gpu_ids=[6], grpc_port=5)
    assert environment["CUDA_VISIBLE_DEVICES"] == "6" and "SGLANG_USE_CPU_ENGINE" not in environment
    with pytest.raises(ValueError, match=r"engine 1 was given GPUs \[1, 2\] but needs 1"):
        server_environment(config, engine_rank=1, gpu_ids=[1, 2], grpc_port=5)
