"""GLM-4.5."""

from transformers import Glm4MoeConfig

from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests

GLM = SIZES | dict(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=24,
)
CASES = {
    # GLM-4.5: biases, norms of queries and keys.
    "full": Glm4MoeConfig(
        **GLM,
        attention_bias=True,
        use_qk_norm=True,
        routed_scaling_factor=2.5,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
    ),
    "tied": Glm4MoeConfig(**GLM, tie_word_embeddings=True),
}
CONTROLS = {
    "another scale of experts": ("full", {"routed_scaling_factor": 1.0}),
    "no groups": ("full", {"n_group": 1, "topk_group": 1}),
    "another number of experts": ("tied", {"num_experts_per_tok": 3}),
    "all of each head rotated": ("tied", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
}
REFUSED = [
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok=4"),
    ({"num_experts_per_tok": 1}, "norm_topk_prob=True with num_experts_per_tok=1"),
    ({"n_group": 4, "topk_group": 1}, "n_group=4 with num_experts_per_tok=4 and topk_group=1"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8' without weight_block_size"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
]
FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "ep2"),
    slow_layouts=("pp2", "cp2", "tp2_sp_etp1", "tp2_sp_ep2"),
    controls=CONTROLS,
    refused=[
        (Glm4MoeConfig(**GLM | changes, architectures=["Glm4MoeForCausalLM"]), named) for changes, named in REFUSED
    ],
    layouts_refused=[
        (Glm4MoeConfig(**GLM, architectures=["Glm4MoeForCausalLM"]), sizes, named)
        for sizes, named in [
            (ParallelSizes(ep=3), "--expert-model-parallel-size 3"),
            (ParallelSizes(tp=2, etp=2), "--sequence-parallel"),
        ]
    ],
)
