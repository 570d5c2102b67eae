"""Qwen3 with experts."""

from transformers import Qwen3MoeConfig

from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests, changed

MOE = SIZES | dict(head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
CASES = {
    "normed": Qwen3MoeConfig(**MOE, norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=False),
    "plain": Qwen3MoeConfig(**MOE, norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=True),
}


def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**MOE, architectures=["Qwen3MoeForCausalLM"])


FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "tp2_sp_etp1", "tp2_sp_ep2", "ep2", "cp2", "pp2"),
    controls={"norm_topk_prob": ("normed", {"norm_topk_prob": False})},
    refused=[
        (
            changed(config(), num_experts_per_tok=1, norm_topk_prob=True),
            "norm_topk_prob=True with num_experts_per_tok=1",
        )
    ],
    layouts_accepted=[(config(), ParallelSizes(tp=2, ep=4, sequence_parallel=True))],
    layouts_refused=[
        (
            config(),
            ParallelSizes(tp=2),
            "--tensor-model-parallel-size 2 of a model with experts needs --sequence-par",
        ),
        (config(), ParallelSizes(ep=3), "--expert-model-parallel-size 3 does not divide the model's 8 experts"),
    ],
)
