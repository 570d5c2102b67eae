"""A DeepSeek-V4 of transformers as the hub has it: names and config.json, which transformers reads and never writes.

SGLang reads these only. Used for tiny models, of tests for example: a trainer's export has the names that it loaded.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from miles.hf.families.deepseek_v4 import KINDS

# Outside of layers.
_WHOLE = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
# Patterns and what takes their place, one after another.
_PARTS = (
    (r"\.attn_hc\.", ".hc_attn_"),
    (r"\.ffn_hc\.", ".hc_ffn_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.compressor\.indexer\.scorer\.weights_proj", ".indexer.weights_proj"),
    (r"\.compressor\.indexer\.q_b_proj", ".indexer.wq_b"),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"position_bias", "ape"),
    (r"\.self_attn\.sinks", ".attn.attn_sink"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"(self_attn\..*)gate_proj", r"\1wgate"),
    (r"q_a_proj", "wq_a"),
    (r"q_b_proj", "wq_b"),
    (r"o_a_proj", "wo_a"),
    (r"o_b_proj", "wo_b"),
    (r"kv_proj", "wkv"),
    (r"e_score_correction_bias", "bias"),
    (r"gate_proj", "w1"),
    (r"down_proj", "w2"),
    (r"up_proj", "w3"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
)
# Ends of names of what is float32 in a checkpoint of any type.
_FLOAT32 = ("_fn", "_base", "_scale", ".attn_sink", ".ape", ".gate.bias")
# In both configurations, with the same meaning.
_SAME = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob", "scoring_func"),
    *("routed_scaling_factor", "swiglu_limit", "sliding_window", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
    *("index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings", "rms_norm_eps", "hidden_act"),
    *("tie_word_embeddings", "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("num_nextn_predict_layers", "initializer_range"),
)
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def hub_name(name: str) -> str:
    """The hub's name of a weight of transformers."""
    name = name.removeprefix("model.")
    if name in _WHOLE:
        return _WHOLE[name]
    for pattern, part in _PARTS:
        name = re.sub(pattern, part, name)
    return name


def hub_weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of transformers under the hub's names, each expert's weights in tensors of their own."""
    weights = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition("mlp.experts.")
        if kind == "gate_up_proj":
            for number, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    weights[hub_name(f"{prefix}mlp.experts.{number}.{part}.weight")] = half
        elif kind == "down_proj":
            for number, down in enumerate(tensor):
                weights[hub_name(f"{prefix}mlp.experts.{number}.down_proj.weight")] = down
        else:
            weights[hub_name(name)] = tensor
    # Halves and experts are views, which safetensors does not write.
    return {
        name: tensor.detach().to(torch.float32 if name.endswith(_FLOAT32) else tensor.dtype, copy=True)
        for name, tensor in weights.items()
    }


def hub_config(hf_config: PreTrainedConfig) -> dict[str, Any]:
    """config.json. The tokens to an entry are the published 4 and 128, whatever `compress_rates` says."""
    ratios = {kind: ratio for ratio, kind in KINDS.items()}
    main, compress = (hf_config.rope_parameters[name] for name in ("main", "compress"))
    kind = {} if hf_config.dtype is None else {"torch_dtype": str(hf_config.dtype).removeprefix("torch.")}
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **{name: getattr(hf_config, name) for name in _SAME},
        "topk_method": "noaux_tc",
        "compress_ratios": [ratios[kind] for kind in hf_config.layer_types] + [0] * hf_config.num_nextn_predict_layers,
        "num_hash_layers": hf_config.mlp_layer_types.count("hash_moe"),
        "rope_theta": main["rope_theta"],
        "compress_rope_theta": compress["rope_theta"],
        "rope_scaling": {"type": "yarn", **{name: compress[name] for name in _YARN}},
        **kind,
    }


def save_hub_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hub_weights(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})


def save_hub_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    save_hub_weights(model, folder)
    (folder / "config.json").write_text(json.dumps(hub_config(model.config), indent=2) + "\n")


@torch.no_grad()
def draw_experts(model: PreTrainedModel) -> None:
    """Fill the tables of hash layers with random experts, all different ones for each token.

    transformers starts them with zeros, which take each token to the first expert several times.
    """
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.rand(len(table), model.config.n_routed_experts).topk(table.shape[1]).indices)
