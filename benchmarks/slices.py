"""config.json of models that benchmarks train: whole dense ones, and slices of models with experts.

A slice has a published model's widths and a few of its layers, as many as one GPU holds with an optimizer.
"""

import json
from pathlib import Path
from typing import Any

from sleep_wake import SIZES, write_checkpoint_config

ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 6,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "max_position_embeddings": 4096,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 2,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    # Of 256, and a quarter of the vocabulary: what fits.
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 4,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 32320,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 4096,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 4,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
DEEPSEEK_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    # Of 256, and a quarter of the vocabulary: what fits.
    "n_routed_experts": 32,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 0,
    "vocab_size": 32320,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
}
_TINY: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024}
SLICES: dict[str, dict[str, Any]] = {
    "30B-A3B": QWEN3_MOE,  # Qwen3, 6 of 48 layers
    "DeepSeek-V3": DEEPSEEK_V3,  # 2 dense layers and 4 with experts
    "DeepSeek-V4": DEEPSEEK_V4,  # Flash, 4 of 43 layers, of all kinds
    "gpt-oss": GPT_OSS,  # 20b, 4 of 24 layers
    "tiny-30B-A3B": QWEN3_MOE
    | _TINY
    | dict(num_hidden_layers=2, moe_intermediate_size=32, head_dim=16, num_experts=16),
    "tiny-DeepSeek-V3": DEEPSEEK_V3
    | _TINY
    | dict(num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=128, moe_intermediate_size=32)
    | dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)
    | dict(v_head_dim=16),
    "tiny-DeepSeek-V4": DEEPSEEK_V4
    | _TINY
    | dict(num_key_value_heads=1, moe_intermediate_size=32, head_dim=32, qk_rope_head_dim=8, q_lora_rank=24, o_groups=2)
    | dict(o_lora_rank=16, n_routed_experts=16, index_n_heads=32, index_head_dim=16, index_topk=8, sliding_window=8),
    "tiny-gpt-oss": GPT_OSS | _TINY | dict(intermediate_size=32, head_dim=16, num_local_experts=8, sliding_window=24),
}
MODELS = (*SIZES, *SLICES)


def write_config(folder: Path, model: str) -> None:
    """config.json of one of `MODELS`; there are no weights."""
    if model in SIZES:
        write_checkpoint_config(folder, model)
        return
    fields = SLICES[model] | {"hidden_act": "silu", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields))
