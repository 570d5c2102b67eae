"""What an SGLang server is started with: arguments, command line and environment.

Miles sets what it must: model, address, parallel size, seed, dtype, no warm-up request, what sharing a GPU takes, and
the backends that a CPU needs. Whatever the user gives as `--sglang-<name>` is added and wins.
"""

import json
import os
import sys
from typing import Any

from miles.config import RunConfig
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.fp8 import fp8_config, fp8_weights
from miles.hf.quantization import quantization_in
from miles.hf.shape import model_shape
from miles.utils.errors import UserError
from miles.utils.network import host_port

HOST = "127.0.0.1"

# A server has these ports to itself, counted from its first, which is that of HTTP. With DP attention SGLang uses six
# more behind DIST_PORT.
PORTS_OF_A_SERVER = 10
NCCL_PORT, GRPC_PORT, DIST_PORT = 1, 2, 3

# Size of the key-value pool, in tokens, and of the batch on a CPU: SGLang derives them from GPU memory otherwise.
CPU_MAX_TOTAL_TOKENS = 32768
CPU_MAX_RUNNING_REQUESTS = 128

# Environment variable: our CPU server gives memory back. SGLang exits on a CPU if its own saver is asked for.
CPU_MEMORY_SAVER = "MILES_CPU_MEMORY_SAVER"


def server_arguments(config: RunConfig, *, engine_rank: int, port: int, host: str = HOST) -> dict[str, object]:
    """Arguments of engine `engine_rank`: names as in `sglang.srt.server_args.ServerArgs`, values as it takes them.

    The server listens on `host` and `port`, and has the PORTS_OF_A_SERVER ports from `port` on to itself.
    """
    arguments: dict[str, object] = {
        "model_path": config.hf_checkpoint,
        "host": host,
        "port": port,
        "nccl_port": port + NCCL_PORT,
        "tp_size": config.engine_tp_size,
        "random_seed": config.seed + engine_rank,
        "dtype": "bfloat16" if config.bf16 else "float32",
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    if config.sglang.get("enable_dp_attention"):
        # It talks over TCP, on this port and the next ones; left out, SGLang starts at a distance from the first port.
        arguments["dist_init_addr"] = host_port(host, port + DIST_PORT)
    if config.device == "cpu":
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "max_total_tokens": CPU_MAX_TOTAL_TOKENS,
            "max_running_requests": CPU_MAX_RUNNING_REQUESTS,
            # An idle scheduler otherwise keeps one core busy, which the trainer needs then.
            "sleep_on_idle": True,
        }
    else:
        arguments["enable_memory_saver"] = _memory_leaves(config, engine_rank)
        if engine_rank < config.num_colocated_engines:
            # The multicast buffers that come with these graphs don't fit beside the trainer.
            arguments["cuda_graph_backend_prefill"] = "disabled"
    arguments |= config.sglang
    if config.needs_trainer and config.rollout_fp8:
        index = CheckpointIndex(config.hf_checkpoint)
        arguments |= _filled_by_updates(arguments, fp8_config(index, fp8_weights(index)))
    elif config.needs_trainer and quantization_in(config.hf_checkpoint) is not None:
        # On Blackwell SGLang looks into the files of a DeepSeek-V3 otherwise, and takes what it finds there.
        arguments |= _filled_by_updates(arguments, None) | {"quantization": "unquant"}
    return arguments


def _filled_by_updates(arguments: dict[str, object], quantization: dict[str, Any] | None) -> dict[str, object]:
    """What loads no weights, and is quantised as those of an update are: the first one fills them in."""
    override: dict[str, Any] = {"quantization_config": quantization}
    if written := arguments.get("json_model_override_args"):
        override |= json.loads(str(written))
    return {"json_model_override_args": json.dumps(override), "load_format": arguments.get("load_format", "dummy")}


def command_line(arguments: dict[str, object]) -> list[str]:
    """The command that starts a server with `arguments`. None and False mean: leave SGLang's default."""
    # Our own entries to the same server: see there.
    device = "cpu" if arguments.get("device") == "cpu" else "gpu"
    command = [sys.executable, "-m", f"miles.backends.sglang_utils.{device}_server"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            command.append(flag)
        elif isinstance(value, (list, tuple)):
            command += [flag, *map(str, value)]
        elif isinstance(value, dict):
            command += [flag, json.dumps(value)]
        else:
            command += [flag, str(value)]
    return command


def server_environment(config: RunConfig, *, engine_rank: int, gpu_ids: list[int], port: int) -> dict[str, str]:
    """Environment of engine `engine_rank`: the caller's, with the GPUs (or CPU cores) that the server may use.

    `gpu_ids` are physical ids; empty on a CPU, where engines share the machine's cores evenly. `port` as in
    `server_arguments`.
    """
    environment = dict(os.environ)
    # Without .pyc files an SGLang start takes three times as long.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # Never opened, but checked: left out, SGLang takes port + 10000, which may be above 65535.
    environment["SGLANG_GRPC_PORT"] = str(port + GRPC_PORT)
    # Otherwise each /health generates a token: a second on a CPU, and the end of an engine whose memory is released.
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    for name, value in _environment_of_the_model(config).items():
        environment.setdefault(name, value)
    if config.device == "cuda":
        if len(gpu_ids) != config.rollout_num_gpus_per_engine:
            raise UserError(
                f"engine {engine_rank} was given GPUs {gpu_ids} but needs {config.rollout_num_gpus_per_engine} "
                "(--rollout-num-gpus-per-engine)."
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
        if _memory_leaves(config, engine_rank):
            # Without it the graphs are captured outside the memory saver, and never leave.
            environment.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
        return environment

    cores = sorted(os.sched_getaffinity(0))
    tp_size = config.engine_tp_size
    environment |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        # One core is left to the HTTP and tokenizer processes: two spinning threads a core cost a factor of ten.
        "OMP_NUM_THREADS": str(max(1, (len(cores) - 1) // (config.num_engines * config.rollout_num_gpus_per_engine))),
    }
    if _memory_leaves(config, engine_rank):
        environment[CPU_MEMORY_SAVER] = "1"
    if tp_size > 1:
        if tp_size > len(cores):
            raise UserError(
                f"--rollout-num-gpus-per-engine {tp_size} needs {tp_size} CPU cores, one a tensor-parallel rank; "
                f"this process may use {len(cores)}."
            )
        # SGLang wants a core list per TP rank as soon as there are more ranks than NUMA nodes.
        bindings = [",".join(map(str, cores[rank::tp_size])) for rank in range(tp_size)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bindings)
    if config.rollout_num_gpus_per_engine > 1:
        # SGLang would set up NCCL wherever it can load the library, GPU or not.
        environment["SGLANG_NCCL_SO_PATH"] = "/nonexistent/libnccl.so"
    return environment


def _environment_of_the_model(config: RunConfig) -> dict[str, str]:
    fields = model_shape(config.hf_checkpoint) or {}
    if fields.get("model_type") != "deepseek_v4":
        return {}
    # Its output projection in FP8 is laid anew after each load of weights, which a second load would break.
    environment = {"SGLANG_OPT_FP8_WO_A_GEMM": "0"}
    if not fields.get("quantization_config"):
        # The published experts are FP4; it looks for them where nothing says otherwise.
        environment["SGLANG_DSV4_FP4_EXPERTS"] = "0"
    if config.device == "cpu":
        # Compiles kernels, whatever the device.
        environment["SGLANG_DSV4_MHC_PREWARM"] = "0"
    return environment


def _memory_leaves(config: RunConfig, engine_rank: int) -> bool:
    """Whether the engine releases memory for the trainer: one with GPUs of its own never does."""
    return bool(config.offload_rollout) and engine_rank < config.num_colocated_engines
