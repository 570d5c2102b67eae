"""DeepSeek-V3.2."""

from transformers import DeepseekV32Config

from tests.fast.backends.megatron_utils.families.data.deepseek_v3 import DEEPSEEK, YARN
from tests.fast.backends.megatron_utils.families.record import FamilyTests, changed

# With few heads many scores are exactly zero, and which of them are picked is anyone's choice.
SPARSE = DEEPSEEK | dict(num_experts=8, index_n_heads=32, index_head_dim=16)
CASES = {
    "sparse": DeepseekV32Config(**SPARSE, index_topk=16, tie_word_embeddings=False),
    "long": DeepseekV32Config(**SPARSE, index_topk=96, rope_parameters=YARN, tie_word_embeddings=True),
}
CONTROLS = {
    "fewer tokens": ("sparse", {"index_topk": 8}),
    "all tokens": ("sparse", {"index_topk": 1024}),
}
REFUSED = [
    ("layer_types", ["deepseek_sparse_attention", "full_attention"], r"layer_types=\['full_attention'\]"),
    ("num_experts", 4, "num_experts=4"),
    ("indexer_rope_interleave", True, "indexer_rope_interleave=True"),
    ("mlp_bias", True, "mlp_bias=True"),
]
FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "ep2"),
    slow_layouts=("pp2", "cp2", "tp2_sp_ep2"),
    controls=CONTROLS,
    refused=[
        (changed(DeepseekV32Config(**SPARSE, architectures=["DeepseekV32ForCausalLM"]), **{field: value}), named)
        for field, value, named in REFUSED
    ],
)
