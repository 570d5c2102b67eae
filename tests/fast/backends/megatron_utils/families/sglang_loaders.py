"""`python sglang_loaders.py FOLDER RESULT`: what SGLang's own models load of given names, without a server.

FOLDER/<case>/ holds a model's config.json and weights.safetensors. Each model is built on the CPU, filled with NaN and
loaded; then again once for each name, without it. RESULT becomes JSON: {case: {"parameters": how many there are,
"empty": names of the model's parameters that still hold a NaN, "unused": names of weights that leave nothing empty when
they are left out, and whose absence no loader refuses}}.
"""

import importlib.machinery
import json
import math
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers.utils import logging

# What a machine without a GPU lacks and some modules with models import; loading does not use it.
sys.modules["tvm_ffi"] = types.ModuleType("tvm_ffi")
sys.modules["tvm_ffi"].__spec__ = importlib.machinery.ModuleSpec("tvm_ffi", None)
sys.modules["tvm_ffi"].Module = object
for kernel in ("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"):
    torch.library.define(f"sgl_kernel::{kernel}", "(Tensor x) -> Tensor")

from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp  # noqa: E402
from sglang.srt.distributed.parallel_state import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.layers.moe.utils import initialize_moe_config  # noqa: E402
from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402


def start(folder: Path) -> None:
    """Make SGLang's process-wide state, as its model runner does; any model that it can serve on a CPU will do."""
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
    )
    set_global_server_args_for_scheduler(arguments)
    init_distributed_environment(
        backend="gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{folder / 'store'}",
    )
    initialize_model_parallel()
    initialize_dp_attention(arguments, ModelConfig(str(folder), dtype="float32"))
    initialize_moe_config(arguments)


def empty_after(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> list[str]:
    """The parameters that hold a NaN, or -1 of whole numbers, once `weights` are loaded over nothing else."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(math.nan if parameter.is_floating_point() else -1)
    # Some loaders write into what they are given.
    model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])
    return sorted(
        name
        for name, parameter in parameters.items()
        if (parameter.isnan() if parameter.is_floating_point() else parameter == -1).any()
    )


def is_unused(model: torch.nn.Module, weights: dict[str, torch.Tensor], name: str, empty: list[str]) -> bool:
    """Whether loading without one of the weights leaves nothing more empty than with it."""
    try:
        return empty_after(model, {other: tensor for other, tensor in weights.items() if other != name}) == empty
    except AssertionError:
        # DeepSeek-V4's refuses one of two that it multiplies by in one product.
        return False


def built(folder: Path) -> torch.nn.Module:
    """SGLang's model of a folder's config.json."""
    config = ModelConfig(str(folder), dtype="float32")
    config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), tp_size=1)
    kind, _ = get_model_architecture(config)
    with set_default_torch_dtype(torch.float32):
        return kind(config=config.hf_config, quant_config=None)


def report(folder: Path) -> dict:
    """What is found of one model."""
    model = built(folder)
    weights = load_file(folder / "weights.safetensors")
    empty = empty_after(model, weights)
    unused = [name for name in weights if is_unused(model, weights, name, empty)]
    return {"parameters": len(list(model.parameters())), "empty": empty, "unused": unused}


def main(root: Path, result: Path) -> None:
    logging.set_verbosity_error()
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    start(root / "LlamaForCausalLM")
    result.write_text(json.dumps({folder.name: report(folder) for folder in folders}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
