"""The quantiser of FP8 blocks."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from miles.hf.block_formats import block_formats
from miles.hf.fp8 import becomes_fp8, quantise, quantization_config
from tests.fast.quantised import FP8, fp8_blocks


@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (1, 5), (129, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_block_is_quantised_by_itself(shape, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).to(dtype)
    codes, scales = quantise(weight)
    their_codes, their_scales, values = fp8_blocks(weight)
    assert torch.equal(scales, their_scales) and torch.equal(codes.view(torch.uint8), their_codes.view(torch.uint8))
    (fp8, _) = block_formats(FP8)
    read = fp8.decode(codes, scales, torch.float32)
    assert torch.equal(read, values)
    # Half a step of a number of three bits behind its first, or of the smallest.
    spread = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert ((read - weight.float()).abs() <= torch.maximum(weight.float().abs() / 16, spread * 2**-10) * 1.001).all()
    again, same = quantise(read)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(same, scales)
    if not any(size % 128 for size in shape):
        assert torch.equal(read, Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32))


def test_zeros_tiny_numbers_and_the_largest():
    for value, expected in ((0.0, 1.0), (1e-30, 1e-30 / 448)):
        codes, scales = quantise(torch.full((128, 128), value))
        assert scales.item() == pytest.approx(expected) and scales.item() > 0 and not codes.isnan().any()
    torch.manual_seed(0)
    # Without a limit the division may give more than 448, and the cast NaN.
    for largest in torch.rand(200) * 1000:
        assert not quantise(torch.full((2, 2), largest.item()))[0].isnan().any()


def test_parts_of_whole_blocks_have_the_bits_of_the_whole():
    torch.manual_seed(0)
    weight = torch.randn(384, 256)
    codes, scales = quantise(weight)
    parts = [quantise(weight[rows]) for rows in (slice(0, 256), slice(256, 384))]
    assert torch.equal(torch.cat([part.view(torch.uint8) for part, _ in parts]), codes.view(torch.uint8))
    assert torch.equal(torch.cat([part for _, part in parts]), scales)


def test_which_weights():
    assert becomes_fp8("model.layers.0.mlp.experts.3.down_proj.weight", (4, 4))
    assert becomes_fp8("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (4, 4))
    for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert not becomes_fp8(name, (4, 4))
    shapes = {"lm_head.weight": (8, 4), "model.norm.weight": (4,), "a.q_proj.weight": (4, 4), "mlp.gate.weight": (2, 4)}
    config = quantization_config(shapes)
    assert config["modules_to_not_convert"] == ["lm_head", "mlp.gate"] and config["weight_block_size"] == [128, 128]
