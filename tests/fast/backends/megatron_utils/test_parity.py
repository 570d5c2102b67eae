"""Megatron against transformers for the dense families, in the layouts that all families share."""

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, prepare

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


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("cases"), CASES)


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2", "cp2", "dp2"])
def test_log_probs_and_gradients_are_those_of_transformers(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_controls(run_ranks, root):
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    check_controls(
        run_ranks,
        root,
        {
            "llama3 rope": ("llama", {"rope_parameters": plain}),
            "yarn": ("qwen3", {"rope_parameters": plain}),
            "window": ("qwen2", {"layer_types": ["full_attention"] * 3}),
        },
    )
