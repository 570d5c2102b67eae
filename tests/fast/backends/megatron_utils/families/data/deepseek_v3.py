"""DeepSeek-V3 and R1."""

from transformers import DeepseekV3Config

from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests, changed

DEEPSEEK = SIZES | dict(
    num_hidden_layers=2,
    num_key_value_heads=4,
    first_k_dense_replace=1,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=48,
    routed_scaling_factor=2.5,
    # Far from that of the latents, which is fixed.
    rms_norm_eps=1e-2,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CASES = {
    "groups": DeepseekV3Config(**DEEPSEEK, tie_word_embeddings=False),
    # Queries without a latent, a stretched rope that does not rotate neighbours, no groups, two shared experts.
    "yarn": DeepseekV3Config(
        **DEEPSEEK | dict(q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=2, rope_interleave=False),
        rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
}
CONTROLS = {
    "no groups": ("groups", {"n_group": 1, "topk_group": 1}),
    "another scale of the experts": ("groups", {"routed_scaling_factor": 1.0}),
    "another rotation": ("groups", {"rope_interleave": False}),
    "no stretch": ("yarn", {"rope_parameters": PLAIN_ROPE}),
    "no scale of angles": ("yarn", {"rope_parameters": YARN | {"mscale": 0.7}}),
    "no scale of scores": ("yarn", {"rope_parameters": YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}}),
}
REFUSED = [
    ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ({"n_shared_experts": 0}, "n_shared_experts=0"),
    ({"norm_topk_prob": False}, "norm_topk_prob=False"),
    ({"num_experts_per_tok": 2}, "n_group=4 with num_experts_per_tok=2 and topk_group=2"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ({"topk_method": "greedy"}, "topk_method='greedy'"),
    ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"rope_parameters": YARN | {"rope_type": "dynamic"}}, "rope_type='dynamic'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8' without weight_block_size"),
]


def config_with(**changes):
    return changed(DeepseekV3Config(**DEEPSEEK, architectures=["DeepseekV3ForCausalLM"]), **changes)


FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "ep2"),
    slow_layouts=("pp2", "cp2", "tp2_sp_ep2", "tp2_sp_etp1"),
    controls=CONTROLS,
    refused=[(config_with(**changes), named) for changes, named in REFUSED],
    layouts_accepted=[(config_with(), ParallelSizes(tp=2, ep=4, cp=2, sequence_parallel=True))],
    layouts_refused=[
        (config_with(), sizes, named)
        for sizes, named in [
            (ParallelSizes(tp=2), "--tensor-model-parallel-size 2 .* needs --sequence-parallel"),
            (
                ParallelSizes(tp=8, sequence_parallel=True),
                "-size 8 does not divide the model's num_attention_heads 4",
            ),
            (ParallelSizes(ep=3), "--expert-model-parallel-size 3"),
        ]
    ],
)
