"""Llama, Qwen2 and Qwen3, in the layouts that all families share."""

from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOW = dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)
CASES = {
    "llama": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, **WINDOW, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, rope_parameters=YARN, tie_word_embeddings=True),
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "pp2", "cp2", "dp2"),
    controls={
        "llama3 rope": ("llama", {"rope_parameters": PLAIN_ROPE}),
        "yarn": ("qwen3", {"rope_parameters": PLAIN_ROPE}),
        "window": ("qwen2", {"layer_types": ["full_attention"] * 3}),
    },
)
