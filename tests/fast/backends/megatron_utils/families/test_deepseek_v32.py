"""DeepSeek-V3.2 against transformers; what it refuses."""

import pytest
from transformers import DeepseekV32Config

from miles.backends.megatron_utils.families import family_for
from tests.fast.backends.megatron_utils.families.parity import check_controls, check_parity, prepare
from tests.fast.backends.megatron_utils.families.test_deepseek_v3 import DEEPSEEK, YARN

# With few heads many scores are exactly zero, and which of them are picked is anyone's choice.
SPARSE = DEEPSEEK | dict(num_experts=8, index_n_heads=32, index_head_dim=16)
CASES = {
    "sparse": DeepseekV32Config(**SPARSE, index_topk=16, tie_word_embeddings=False),
    "long": DeepseekV32Config(**SPARSE, index_topk=96, rope_parameters=YARN, tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("cases"), CASES)


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "ep2"])
def test_parity(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "cp2", "tp2_sp_ep2"])
def test_parity_in_further_layouts(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_controls(run_ranks, root):
    controls = {
        "fewer tokens": ("sparse", {"index_topk": 8}),
        "all tokens": ("sparse", {"index_topk": 1024}),
    }
    check_controls(run_ranks, root, controls)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layer_types", ["deepseek_sparse_attention", "full_attention"], r"layer_types=\['full_attention'\]"),
        ("num_experts", 4, "num_experts=4"),
        ("indexer_rope_interleave", True, "indexer_rope_interleave=True"),
        ("mlp_bias", True, "mlp_bias=True"),
    ],
)
def test_refused(field, value, message):
    config = DeepseekV32Config(**SPARSE, architectures=["DeepseekV32ForCausalLM"])
    family_for(config)
    setattr(config, field, value)
    with pytest.raises(ValueError, match=message):
        family_for(config)
