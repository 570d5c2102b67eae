"""Our rotation and frequencies against those of transformers' models."""

import pytest
import torch
from transformers import Gemma3TextConfig, Glm4Config, GptOssConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4

from miles.backends.megatron_utils.parts.rope import Rope, rope_of, rotate

POSITIONS = torch.tensor([0, 1, 2, 7, 100, 8191, 30000])
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=16.0,
    low_freq_factor=1.0,
    high_freq_factor=1.0,  # Llama 4 Scout: no band between
    original_max_position_embeddings=4096,
)
YARN = dict(
    rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=4096,
)  # fmt: skip


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def llama(rope_parameters, head_dim=32):
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=rope_parameters,
    )


@pytest.mark.parametrize("rope_parameters", [dict(rope_type="default", rope_theta=10000.0), LLAMA3])
def test_halves_are_llamas(rope_parameters):
    config = llama(rope_parameters)
    query, key = tensors((len(POSITIONS), 4, 32), (len(POSITIONS), 2, 32))
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(query, POSITIONS[None])
    expected = modeling_llama.apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in (query, key)), cos, sin)
    angles = rope_of(config).angles(POSITIONS)
    for x, want in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rotate(x, *angles), want[0].transpose(0, 1), rtol=0, atol=1e-6)


def test_partial_and_interleaved_are_glms():
    config = Glm4Config(hidden_size=64, num_attention_heads=4, head_dim=32, partial_rotary_factor=0.5)
    (query,) = tensors((len(POSITIONS), 4, 32))
    cos, sin = modeling_glm4.Glm4RotaryEmbedding(config)(query, POSITIONS[None])
    want, _ = modeling_glm4.apply_rotary_pos_emb(*[query.transpose(0, 1)[None]] * 2, cos, sin)
    rope = rope_of(config, interleaved=True)
    assert len(rope.inv_freq_R) == 8
    got = rotate(query, *rope.angles(POSITIONS), interleaved=True)
    torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=0, atol=1e-6)
    assert torch.equal(got[..., 16:], query[..., 16:])


def test_interleaved_is_llama_4s_complex_product():
    (query,) = tensors((len(POSITIONS), 4, 32))
    rope = rope_of(llama(dict(rope_type="default", rope_theta=10000.0)), interleaved=True)
    turns = POSITIONS[:, None].float() * rope.inv_freq_R
    want, _ = modeling_llama4.apply_rotary_emb(
        query[None], query[None], torch.polar(torch.ones_like(turns), turns)[None]
    )
    torch.testing.assert_close(rotate(query, *rope.angles(POSITIONS), True), want[0], rtol=0, atol=1e-6)


def test_yarn_and_its_attention_factor_are_gpt_oss():
    config = GptOssConfig(hidden_size=64, num_attention_heads=4, head_dim=32, rope_parameters=dict(YARN))
    reference = GptOssRotaryEmbedding(config)
    rope = rope_of(config)
    assert torch.equal(rope.inv_freq_R, reference.inv_freq) and rope.scale == reference.attention_scaling > 1.3
    (query,) = tensors((len(POSITIONS), 4, 32))
    cos, sin = reference(query, POSITIONS[None])  # [1, T, R/2], the factor in them
    first, second = query.chunk(2, -1)
    cos, sin = cos[0, :, None], sin[0, :, None]
    want = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    torch.testing.assert_close(rotate(query, *rope.angles(POSITIONS)), want, rtol=0, atol=2e-6)


def test_two_ropes_of_one_model_are_gemma_3s():
    config = Gemma3TextConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=32,
        rope_parameters={
            "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            "sliding_attention": dict(rope_type="default", rope_theta=1e4),
        },
    )
    reference = Gemma3RotaryEmbedding(config)
    for kind in ("full_attention", "sliding_attention"):
        rope = rope_of(config, config.rope_parameters[kind])
        assert torch.equal(rope.inv_freq_R, getattr(reference, f"{kind}_inv_freq")) and rope.scale == 1.0


def test_dim_is_the_rotated_width():
    config = llama({**YARN, "partial_rotary_factor": 0.25}, head_dim=64)
    assert len(rope_of(config).inv_freq_R) == 8
    assert torch.equal(rope_of(config, dim=16).inv_freq_R, rope_of(config).inv_freq_R)
    assert len(rope_of(config, dim=64).inv_freq_R) == 32


def test_a_scaling_that_depends_on_the_length_is_refused():
    config = llama(dict(rope_type="dynamic", rope_theta=1e4, factor=2.0))
    with pytest.raises(ValueError, match="rope_type='dynamic'.*'yarn'"):
        rope_of(config)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_is_the_rotation_back_with_its_scale(interleaved):
    rope = Rope(torch.tensor([1.0, 0.3, 0.01]), scale=1.25, interleaved=interleaved)
    angles = tuple(x.double() for x in rope.angles(torch.arange(5)))
    x, weight = (x.double() for x in tensors((5, 2, 8), (5, 2, 8)))
    x.requires_grad_()
    (rotate(x, *angles, interleaved) * weight).sum().backward()
    eye = torch.eye(5 * 2 * 8).view(-1, 5, 2, 8)
    want = torch.stack([(rotate(column, *angles, interleaved) * weight).sum() for column in eye]).view(5, 2, 8)
    torch.testing.assert_close(x.grad, want, rtol=0, atol=1e-6)


def test_bfloat16_is_rotated_in_float32():
    rope = rope_of(llama(dict(rope_type="default", rope_theta=10000.0)))
    (query,) = tensors((len(POSITIONS), 4, 32))
    query = query.bfloat16()
    got = rotate(query, *rope.angles(POSITIONS))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(query.float(), *rope.angles(POSITIONS)).bfloat16())
