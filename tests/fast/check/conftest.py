"""Configurations of models of which there is nothing but config.json."""

import json
from pathlib import Path

import pytest

from miles.utils.arguments import resolve

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}


def qwen3(hidden: int, layers: int, inner: int, heads: int, groups: int, **fields) -> dict:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
    return {**QWEN3, **sizes, "num_attention_heads": heads, "num_key_value_heads": groups, **fields}


# Those of benchmarks/sleep_wake.py.
DENSE = {
    "0.6B": qwen3(1024, 28, 3072, 16, 8),
    "1.7B": qwen3(2048, 28, 6144, 16, 8),
    "4B": qwen3(2560, 36, 9728, 32, 8),
    "7B": qwen3(4096, 30, 12288, 32, 8, tie_word_embeddings=False),
    "8B": qwen3(4096, 36, 12288, 32, 8, tie_word_embeddings=False),
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_30B = qwen3(2048, 48, 6144, 32, 4, tie_word_embeddings=False) | MOE


@pytest.fixture
def configured(tmp_path: Path):
    """`configured(fields, flags)`: the configuration of one node of eight GPUs, shared by both sides unless told."""

    def make(fields: dict, flags: str = "", shared: bool = True):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"input": "unused", "label": "unused"}\n')
        given = f"--hf-checkpoint {tmp_path} --prompt-data {prompts} --rm-type exact --label-key label --num-rollout 1 "
        given += "--rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 1792 "
        given += "--rollout-max-prompt-len 256 "
        given += "--colocate " if shared else ""
        given += "" if "--actor-num-gpus-per-node" in flags else "--actor-num-gpus-per-node 8 "
        return resolve((given + flags).split()).config

    return make
