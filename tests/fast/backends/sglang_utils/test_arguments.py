import json
import os
import sys
from itertools import pairwise

import pytest

from miles.backends.sglang_utils.arguments import (
    CPU_MEMORY_SAVER,
    PORTS_OF_A_SERVER,
    command_line,
    server_arguments,
    server_environment,
)
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.utils.arguments import parse_args


def test_cpu_arguments_and_the_users_win(engine_flags):
    config = parse_args([*engine_flags, "--sglang-max-running-requests", "16", "--sglang-log-level", "info"])
    arguments = server_arguments(config, engine_rank=2, port=5000)
    assert arguments["device"] == "cpu" and arguments["dtype"] == "float32"
    assert arguments["host"] == "127.0.0.1" and arguments["port"] == 5000 and "dist_init_addr" not in arguments
    assert arguments["random_seed"] == config.seed + 2
    assert arguments["max_running_requests"] == 16 and arguments["log_level"] == "info"


def test_an_engine_that_is_sent_weights_holds_no_quantised_ones(engine_flags, tmp_path):
    (tmp_path / "model").mkdir()
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fields = {"architectures": ["Qwen3ForCausalLM"], "quantization_config": quantised}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    flags = [
        str(tmp_path / "model") if before == "--hf-checkpoint" else flag
        for before, flag in pairwise(["", *engine_flags])
    ]
    arguments = server_arguments(parse_args(flags), engine_rank=0, port=5000)
    assert arguments["load_format"] == "dummy" and arguments["quantization"] == "unquant"
    assert json.loads(arguments["json_model_override_args"]) == {"quantization_config": None}
    users = ["--sglang-load-format", "auto", "--sglang-json-model-override-args", '{"a": 1}']
    arguments = server_arguments(parse_args([*flags, *users]), engine_rank=0, port=5000)
    assert arguments["load_format"] == "auto"
    assert json.loads(arguments["json_model_override_args"]) == {"quantization_config": None, "a": 1}
    alone = server_arguments(parse_args([*flags, "--debug-rollout-only"]), engine_rank=0, port=5000)
    assert not {"load_format", "json_model_override_args", "quantization"} & alone.keys()


def test_an_fp8_engine_is_quantised_as_updates_are(engine_flags, tmp_path):
    make_tiny_checkpoint(tmp_path / "model", num_layers=1, tie=False)
    flags = [
        str(tmp_path / "model") if before == "--hf-checkpoint" else flag
        for before, flag in pairwise(["", *engine_flags])
    ]
    arguments = server_arguments(parse_args([*flags, "--rollout-fp8"]), engine_rank=0, port=5000)
    override = json.loads(arguments["json_model_override_args"])["quantization_config"]
    assert override["quant_method"] == "fp8" and override["weight_block_size"] == [128, 128]
    assert override["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    assert arguments["load_format"] == "dummy" and "quantization" not in arguments


def test_gpu_arguments_leave_sglang_its_defaults(engine_flags):
    config = parse_args(["cuda" if flag == "cpu" else flag for flag in engine_flags])
    arguments = server_arguments(config, engine_rank=0, port=5000)
    assert arguments["dtype"] == "bfloat16"
    assert not {"device", "attention_backend", "mem_fraction_static", "max_total_tokens"} & arguments.keys()


@pytest.mark.parametrize("offload", [True, False])
def test_memory_that_leaves_a_gpu(engine_flags, offload):
    flags = ["cuda" if flag == "cpu" else flag for flag in engine_flags]
    config = parse_args([flag for flag in flags if flag != "--no-offload-rollout" or not offload])
    arguments = server_arguments(config, engine_rank=0, port=5000)
    assert ("--enable-memory-saver" in command_line(arguments)) == offload
    assert arguments["cuda_graph_backend_prefill"] == "disabled"
    environment = server_environment(config, engine_rank=0, gpu_ids=[0], port=5)
    assert ("SGLANG_MEMORY_SAVER_CUDA_GRAPH" in environment) == offload
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert CPU_MEMORY_SAVER not in environment


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_engine_with_gpus_of_its_own_keeps_its_memory(engine_flags, device):
    flags = [device if flag == "cpu" else flag for flag in engine_flags if not flag.startswith("--no-offload")]
    config = parse_args([*flags, "--rollout-num-gpus", "2"])
    own = server_arguments(config, engine_rank=1, port=5000)
    assert not own.get("enable_memory_saver") and "cuda_graph_backend_prefill" not in own
    environments = [server_environment(config, engine_rank=rank, gpu_ids=[rank], port=5) for rank in range(2)]
    saver = CPU_MEMORY_SAVER if device == "cpu" else "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    assert saver in environments[0] and saver not in environments[1]


def test_parallel_sizes_and_ports_of_their_own(engine_flags):
    flags = ["cuda" if flag == "cpu" else flag for flag in engine_flags]
    flags[flags.index("--actor-num-gpus-per-node") + 1] = "4"
    attention = ("--sglang-enable-dp-attention", "--sglang-dp-size", "4", "--sglang-ep-size", "2")
    config = parse_args([*flags, "--rollout-num-gpus-per-engine", "4", *attention])
    arguments = server_arguments(config, engine_rank=0, host="10.0.0.7", port=5000)
    command = command_line(arguments)
    assert [command[command.index(f"--{name}-size") + 1] for name in ("tp", "dp", "ep")] == ["4", "4", "2"]
    assert "--enable-dp-attention" in command and arguments["host"] == "10.0.0.7"
    # SGLang takes six ports behind dist_init_addr's with DP attention: all within what the engine has found free.
    host, first = arguments["dist_init_addr"].split(":")
    grpc = int(server_environment(config, engine_rank=0, gpu_ids=[0, 1, 2, 3], port=5000)["SGLANG_GRPC_PORT"])
    ports = [5000, arguments["nccl_port"], grpc, *range(int(first), int(first) + 7)]
    assert host == "10.0.0.7" and len(set(ports)) == len(ports)
    assert set(ports) <= set(range(5000, 5000 + PORTS_OF_A_SERVER))

    stages = parse_args([*flags, "--debug-rollout-only", "--rollout-num-gpus-per-engine", "4", "--sglang-pp-size", "2"])
    command = command_line(server_arguments(stages, engine_rank=0, port=5000))
    assert [command[command.index(f"--{name}-size") + 1] for name in ("tp", "pp")] == ["2", "2"]


def test_the_users_prefill_graphs_win(engine_flags):
    flags = ["cuda" if flag == "cpu" else flag for flag in engine_flags]
    config = parse_args([*flags, "--sglang-cuda-graph-backend-prefill", "breakable"])
    arguments = server_arguments(config, engine_rank=0, port=5000)
    assert arguments["cuda_graph_backend_prefill"] == "breakable"


@pytest.mark.parametrize("offload", [True, False])
def test_memory_that_leaves_a_cpu(engine_flags, offload):
    config = parse_args([flag for flag in engine_flags if flag != "--no-offload-rollout" or not offload])
    # SGLang's own saver ends the server on a CPU.
    assert "enable_memory_saver" not in server_arguments(config, engine_rank=0, port=5000)
    environment = server_environment(config, engine_rank=0, gpu_ids=[], port=5)
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
    environment = server_environment(config, engine_rank=0, gpu_ids=[], port=5)
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1" and environment["OMP_NUM_THREADS"] == "3"
    assert "PYTHONDONTWRITEBYTECODE" not in environment and "SGLANG_CPU_OMP_THREADS_BIND" not in environment

    two = config.model_copy(update={"rollout_num_gpus_per_engine": 2, "rollout_num_gpus": 2})
    environment = server_environment(two, engine_rank=0, gpu_ids=[], port=5)
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0,2|1,3" and environment["OMP_NUM_THREADS"] == "1"

    eight = config.model_copy(update={"rollout_num_gpus_per_engine": 8, "rollout_num_gpus": 8})
    with pytest.raises(ValueError, match="needs 8 CPU cores.*may use 4"):
        server_environment(eight, engine_rank=0, gpu_ids=[], port=5)


def test_gpu_environment(engine_flags):
    config = parse_args(["cuda" if flag == "cpu" else flag for flag in engine_flags])
    environment = server_environment(config, engine_rank=0, gpu_ids=[6], port=5)
    assert environment["CUDA_VISIBLE_DEVICES"] == "6" and "SGLANG_USE_CPU_ENGINE" not in environment
    with pytest.raises(ValueError, match=r"engine 1 was given GPUs \[1, 2\] but needs 1"):
        server_environment(config, engine_rank=1, gpu_ids=[1, 2], port=5)
