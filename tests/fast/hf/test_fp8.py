"""The quantiser of FP8 blocks."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from miles.hf import fp8 as room
from miles.hf.block_formats import block_formats
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.fp8 import fp8_config, fp8_weights, quantise
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from tests.fast.quantised import FP8, fp4_blocks, fp8_blocks, write_fp8


@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (1, 5), (129, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_block_is_quantised_by_itself(shape, dtype, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(room, "_PIECE", 2**14)  # a row of blocks at a time
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


def index_of(folder, shapes, config="{}"):
    folder.mkdir()
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(config)
    return CheckpointIndex(folder)


def test_which_weights(tmp_path):
    layer = "model.layers.0."
    quantised = {layer + "mlp.experts.3.down_proj.weight", layer + "self_attn.kv_a_proj_with_mqa.weight"}
    plain = {"lm_head.weight": (8, 4), layer + "mlp.gate.weight": (2, 4), "model.norm.weight": (4,)}
    bias = {layer + "self_attn.q_proj.bias": (4,)}
    index = index_of(tmp_path / "plain", dict.fromkeys(quantised, (4, 4)) | plain | bias)
    assert fp8_weights(index) == quantised
    config = fp8_config(index, quantised)
    assert config["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.gate"]
    assert config["weight_block_size"] == [128, 128]


def test_a_checkpoint_in_fp8_says_which_itself(tmp_path):
    make_tiny_checkpoint(tmp_path / "source", hidden_size=256, num_layers=1, head_dim=64)
    write_fp8(tmp_path / "source", tmp_path / "fp8", tmp_path / "plain")
    index = CheckpointIndex(tmp_path / "fp8")
    assert fp8_weights(index) == set(index.quantised) == fp8_weights(CheckpointIndex(tmp_path / "plain"))
    assert fp8_config(index, fp8_weights(index)) == FP8


def test_what_has_no_fp8_form(tmp_path):
    for number, (shapes, problem) in enumerate(
        (
            ({"experts.gate_up_proj": (2, 4, 4), "q_proj.weight": (4, 4)}, "experts in one tensor"),
            ({"a.weight": (2, 2)}, "has no projections"),
        )
    ):
        with pytest.raises(ValueError, match=problem):
            fp8_weights(index_of(tmp_path / str(number), shapes))
    codes = {"a.w1.weight": fp4_blocks(torch.randn(4, 32))[0].view(torch.int8)}
    scales = {"a.w1.scale": torch.full((4, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)}
    (tmp_path / "fp4").mkdir()
    save_file(codes | scales, tmp_path / "fp4" / "model.safetensors")
    (tmp_path / "fp4" / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    with pytest.raises(ValueError, match="in another form than FP8 blocks of 128 x 128"):
        fp8_weights(CheckpointIndex(tmp_path / "fp4"))
