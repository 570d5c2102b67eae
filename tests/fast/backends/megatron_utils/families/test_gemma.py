"""Gemma 2 and 3 against transformers; what they refuse."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

from miles.backends.megatron_utils.families import family_for
from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, prepare

GEMMA = SIZES | dict(
    num_hidden_layers=2,
    head_dim=32,
    pad_token_id=None,
    query_pre_attn_scalar=24,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention"],
)
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {"sliding_attention": LOCAL, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
CASES = {
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma2 untied": Gemma2Config(
        **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False
    ),
    "gemma3": Gemma3TextConfig(**GEMMA, rope_parameters=ROPES),
    "gemma3 untied": Gemma3TextConfig(**GEMMA, final_logit_softcapping=5.0, tie_word_embeddings=False),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("cases"), CASES)


@pytest.mark.parametrize("layout", ["one", "tp2_sp"])
def test_parity(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "cp2"])
def test_parity_in_further_layouts(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_controls(run_ranks, root):
    swapped = ["full_attention", "sliding_attention"]
    controls = {
        "no cap of scores": ("gemma2", {"attn_logit_softcapping": None}),
        "no cap of logits": ("gemma2", {"final_logit_softcapping": None}),
        "another scale of scores": ("gemma2", {"query_pre_attn_scalar": 32}),
        "no window": ("gemma2", {"sliding_window": None}),
        "windows in the wrong layer": ("gemma2", {"layer_types": swapped}),
        "no stretch of the full layers' rope": ("gemma3", {"rope_parameters": ROPES | {"full_attention": LOCAL}}),
        "another rope in layers with a window": (
            "gemma3",
            {"rope_parameters": ROPES | {"sliding_attention": LOCAL | {"rope_theta": 1e6}}},
        ),
        "no cap of logits in Gemma 3": ("gemma3 untied", {"final_logit_softcapping": None}),
    }
    check_controls(run_ranks, root, controls)


@pytest.mark.parametrize(
    ("config_class", "architecture", "changes", "named"),
    [
        (Gemma2Config, "Gemma2ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        (Gemma2Config, "Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (Gemma2Config, "Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (Gemma3TextConfig, "Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (Gemma3TextConfig, "Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (
            Gemma3TextConfig,
            "Gemma3ForCausalLM",
            {"rope_parameters": ROPES | {"sliding_attention": LOCAL | {"rope_type": "dynamic", "factor": 2.0}}},
            "rope_parameters.sliding_attention.rope_type='dynamic'",
        ),
        (Gemma3TextConfig, "Gemma3nForCausalLM", {}, "architectures=.'Gemma3nForCausalLM'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config_class, architecture, changes, named):
    with pytest.raises(ValueError, match=named):
        family_for(config_class(**{**GEMMA, **changes}, architectures=[architecture]))


def test_the_activation_that_checkpoints_list_beside_the_real_one_is_not_read():
    family_for(Gemma2Config(**GEMMA, hidden_act="gelu_pytorch_tanh", architectures=["Gemma2ForCausalLM"]))


class Table(torch.nn.Module):
    """Megatron's embedding as far as `after_build` knows it."""

    def __init__(self, embedding: torch.nn.Embedding):
        super().__init__()
        self.word_embeddings = embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(tokens)


def test_embeddings_in_half_precision_are_scaled_as_transformers_does():
    # The root of 3072, 55.4256, is 55.5 in bfloat16.
    hf_config = Gemma2Config(**GEMMA | dict(hidden_size=3072), architectures=["Gemma2ForCausalLM"])
    expected = Gemma2TextScaledWordEmbedding(8, 3072, None, embed_scale=3072**0.5).to(torch.bfloat16)
    model = SimpleNamespace(pre_process=True, embedding=Table(torch.nn.Embedding(8, 3072, _weight=expected.weight)))
    family_for(hf_config).after_build(hf_config, model)
    tokens = torch.arange(8)
    assert torch.equal(model.embedding(tokens), expected(tokens))
