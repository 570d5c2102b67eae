import pytest
from transformers import Qwen3MoeConfig

from miles.backends.megatron_utils.families import family_for
from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, prepare

MOE = SIZES | dict(head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
CASES = {
    "normed": Qwen3MoeConfig(**MOE, norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=False),
    "plain": Qwen3MoeConfig(**MOE, norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("cases"), CASES)


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "tp2_sp_etp1", "tp2_sp_ep2", "ep2", "cp2", "pp2"])
def test_parity(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_controls(run_ranks, root):
    check_controls(run_ranks, root, {"norm_topk_prob": ("normed", {"norm_topk_prob": False})})


def test_refused():
    config = Qwen3MoeConfig(**MOE, architectures=["Qwen3MoeForCausalLM"])
    family = family_for(config)
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 2 of a model with experts needs --sequence-par"):
        family.check_layout(config, ParallelSizes(tp=2))
    with pytest.raises(ValueError, match="--expert-model-parallel-size 3 does not divide the model's 8 experts"):
        family.check_layout(config, ParallelSizes(ep=3))
    family.check_layout(config, ParallelSizes(tp=2, ep=4, sequence_parallel=True))
    config.num_experts_per_tok, config.norm_topk_prob = 1, True
    with pytest.raises(ValueError, match="norm_topk_prob=True with num_experts_per_tok=1"):
        family_for(config)
