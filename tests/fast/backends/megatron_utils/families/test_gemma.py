"""What is special in Gemma 2 and 3."""

from types import SimpleNamespace

import torch
from transformers import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

from miles.backends.megatron_utils.families import family_for
from tests.fast.backends.megatron_utils.families.data.gemma import GEMMA


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
