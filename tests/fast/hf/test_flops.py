"""What a forward pass computes, against the weights of transformers' models and what torch counts in one."""

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from miles.hf.families import shape_of
from miles.hf.families.deepseek_v4 import HEAVY, SPARSE, WINDOW
from miles.hf.flops import ForwardFlops, checkpoint_flops, forward_flops

SIZES = dict(
    vocab_size=251,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
MLA = dict(kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, num_key_value_heads=4)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=48)
FAMILIES = {
    "dense": ("Qwen3Config", dict(head_dim=32)),
    "windows": ("Gemma2Config", dict(head_dim=24, sliding_window=16)),
    "experts": (
        "Qwen3MoeConfig",
        dict(head_dim=16, num_experts=8, decoder_sparse_step=2, mlp_only_layers=[3], **EXPERTS),
    ),
    "latent": (
        "DeepseekV3Config",
        dict(q_lora_rank=20, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
        | MLA
        | EXPERTS,
    ),
    "latent without query rank": (
        "DeepseekV3Config",
        dict(q_lora_rank=None, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=4) | MLA | EXPERTS,
    ),
    "gpt-oss": (
        "GptOssConfig",
        dict(head_dim=16, num_local_experts=8, num_experts_per_tok=4, sliding_window=16),
    ),
    "llama 4": (
        "Llama4TextConfig",
        dict(head_dim=16, num_local_experts=8, num_experts_per_tok=1, interleave_moe_layer_step=2)
        | dict(intermediate_size_mlp=160, attention_chunk_size=32),
    ),
    "compressed": (
        "DeepseekV4Config",
        dict(head_dim=32, partial_rotary_factor=0.25, num_key_value_heads=1, q_lora_rank=20, o_groups=2, o_lora_rank=12)
        | dict(layer_types=[WINDOW, SPARSE, HEAVY, SPARSE], n_routed_experts=8, index_n_heads=4, index_head_dim=16)
        | dict(sliding_window=16, index_topk=8)
        | EXPERTS,
    ),
    "delta nets": (
        "Qwen3NextConfig",
        dict(head_dim=16, num_experts=8, shared_expert_intermediate_size=40)
        | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
        | EXPERTS,
    ),
}


def hf_config(name: str) -> PreTrainedConfig:
    kind, fields = FAMILIES[name]
    return getattr(transformers, kind)(**{**SIZES, **fields})


def weights_met(config: PreTrainedConfig) -> float:
    """Weights of the layers' products that one token goes through."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = config.to_dict()
    experts = shape.get("num_experts") or shape.get("num_local_experts") or shape.get("n_routed_experts")
    total = 0
    # Small beside the rest, see `forward_flops`.
    small = (".gate.weight", ".router.weight", ".shared_expert_gate.weight", "_bias", "_hc.fn")
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.dim() == 3:
            total += parameter.numel() * shape["num_experts_per_tok"] // experts
        elif ".layers." in name and parameter.dim() == 2 and ".indexer." not in name and not name.endswith(small):
            total += parameter.numel()
    return total


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_that_a_token_meets(name):
    config = hf_config(name)
    flops = forward_flops(shape_of(config.to_dict()))
    assert flops.per_token == 2 * weights_met(config)
    assert flops.per_response_token == 2 * 64 * 251


@pytest.mark.parametrize("name", ["dense", "latent without query rank"])
def test_as_torch_counts_a_pass(name, tmp_path):
    config, length = hf_config(name), 40
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64))
    flops = checkpoint_flops(tmp_path)
    # Eager attention multiplies the pairs, too, that causal attention doesn't see; it turns angles by a product.
    (per_pair,) = flops.per_pair.values()
    angles = sum(2 * length * size // 2 for size in [config.to_dict().get("qk_rope_head_dim") or config.head_dim])
    counted = flops.of(np.array([length]), np.array([length])).item() + per_pair * length**2 / 2 + angles
    assert counter.get_total_flops() == counted


def test_pairs_of_each_kind_of_layer():
    full = 2 * 4 * 2 * 24
    assert forward_flops(shape_of(hf_config("windows").to_dict())).per_pair == {None: 2 * full, 16: 2 * full}
    assert forward_flops(shape_of(hf_config("latent").to_dict())).per_pair == {None: 4 * 2 * 4 * (12 + 8 + 10)}
    assert forward_flops(shape_of(hf_config("delta nets").to_dict())).per_pair == {None: 2 * 4 * 2 * 16}
    assert set(forward_flops(shape_of(hf_config("llama 4").to_dict())).per_pair) == {None, 32}
    # Queries see a window of tokens; of the entries, which stand for 4 and 128 tokens, the picked ones, or all.
    tokens = 2 * 2 * 4 * 32
    compressed = forward_flops(shape_of(hf_config("compressed").to_dict())).per_pair
    assert compressed == {16: 4 * tokens, 4 * 8: 2 * tokens / 4, None: tokens / 128}
    mistral = transformers.MistralConfig(**SIZES, sliding_window=8)
    assert forward_flops(shape_of(mistral.to_dict())).per_pair == {8: 4 * 2 * 4 * 2 * 16}


def test_work_of_samples_by_hand():
    flops = ForwardFlops(per_token=10, per_response_token=3, per_pair={None: 2, 4: 100})
    found = flops.of(np.array([2, 6]), np.array([1, 5]))
    # Pairs: 2 and 18; within a window of four tokens 2 and 4 * 6 - 8.
    assert found.tolist() == [20 + 3 + 2 * 2 + 100 * 2, 60 + 15 + 2 * 18 + 100 * 16]
