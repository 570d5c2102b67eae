"""GLM-4.7-Flash."""

from transformers import Glm4MoeLiteConfig

from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests, changed

FLASH = SIZES | dict(
    num_hidden_layers=2,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    # As wide as queries and keys.
    v_head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    # Far from that of the latents, which is fixed.
    rms_norm_eps=1e-2,
)
CASES = {
    "flash": Glm4MoeLiteConfig(**FLASH, tie_word_embeddings=False),
    "tied": Glm4MoeLiteConfig(**FLASH, mlp_layer_types=["sparse", "dense"], tie_word_embeddings=True),
}
CONTROLS = {
    "another scale of the experts": ("flash", {"routed_scaling_factor": 1.0}),
    "another rotation": ("flash", {"rope_interleave": False}),
    "another epsilon": ("flash", {"rms_norm_eps": 1e-6}),
}
REFUSED = [
    ("mlp_layer_types", ["dense", "linear"], r"mlp_layer_types=\['linear'\]"),
    ("first_k_dense_replace", 2, "first_k_dense_replace=2 with 1 leading dense layers"),
    ("attention_bias", True, "attention_bias=True"),
]
FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "ep2"),
    slow_layouts=("pp2", "cp2"),
    controls=CONTROLS,
    refused=[
        (changed(Glm4MoeLiteConfig(**FLASH, architectures=["Glm4MoeLiteForCausalLM"]), **{field: value}), named)
        for field, value, named in REFUSED
    ],
)
