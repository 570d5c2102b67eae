"""Quantised checkpoints, whose values are compared with other people's ways to them."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from miles.hf import block_formats
from miles.hf.checkpoint import CheckpointIndex
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from tests.fast.quantised import FP8, MXFP4, fp4_blocks, fp8_blocks, write_fp8

GPT_OSS = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    monkeypatch.setattr(block_formats, "_PIECE", 5000)


def index_of(folder, tensors, quantization=FP8):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return CheckpointIndex(folder)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_checkpoint_reads_as_transformers_reads_it(tmp_path, power_of_two):
    make_tiny_checkpoint(tmp_path / "source", hidden_size=256, num_layers=1, head_dim=64, intermediate_size=512)
    write_fp8(tmp_path / "source", tmp_path / "fp8", tmp_path / "bf16", power_of_two)
    index, plain = CheckpointIndex(tmp_path / "fp8"), CheckpointIndex(tmp_path / "bf16")
    assert (index.shapes, index.dtypes) == (plain.shapes, plain.dtypes) and len(index) == len(plain) == 13
    assert len(index.quantised) == 7
    way = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype=torch.bfloat16, quantization_config=way
    ).state_dict()
    for name in plain.files:
        value = index.read(name)
        assert value.dtype == torch.bfloat16 and torch.equal(value, plain.read(name)), name
        assert torch.equal(value, model[name]), name
    exact = [torch.equal(index.read(name), index.read(name, dtype=torch.float32)) for name in index.quantised]
    assert all(exact) if power_of_two else not any(exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("scales", ["a.weight_scale_inv", "a.scale"])
def test_scales_of_other_types_and_blocks_that_end_early(tmp_path, dtype, scales):
    torch.manual_seed(0)
    codes, scale, _ = fp8_blocks(torch.randn(200, 300), power_of_two=dtype == torch.float8_e8m0fnu)
    index = index_of(tmp_path, {"a.weight": codes, scales: scale.to(dtype), "b": torch.ones(())})
    assert list(index.files) == ["b", "a.weight"] and index.shapes["a.weight"] == (200, 300)
    spread = scale.to(dtype).float().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(index.read("a.weight", dtype=torch.float32), codes.float() * spread)
    assert index.read("b") == 1


def test_fp4_beside_fp8(tmp_path):
    """As DeepSeek-V4 has its experts."""
    torch.manual_seed(0)
    packed, exponents, values = fp4_blocks(torch.randn(24, 96))
    name = "layers.0.ffn.experts.0.w1"
    tensors = {name + ".weight": packed.view(torch.int8), name + ".scale": exponents.view(torch.float8_e8m0fnu)}
    codes, scale, fp8_values = fp8_blocks(torch.randn(128, 256), power_of_two=True)
    tensors |= {"layers.0.attn.wkv.weight": codes, "layers.0.attn.wkv.scale": scale.to(torch.float8_e8m0fnu)}
    index = index_of(tmp_path, tensors, FP8 | {"scale_fmt": "ue8m0"})
    assert index.shapes == {name + ".weight": (24, 96), "layers.0.attn.wkv.weight": (128, 256)}
    read = index.read(name + ".weight")
    theirs = Fp8Dequantize(None)._dequantize_one(packed.view(torch.int8), exponents, torch.bfloat16)
    assert torch.equal(read, values.bfloat16()) and torch.equal(read, theirs)
    assert torch.equal(index.read("layers.0.attn.wkv.weight", dtype=torch.float32), fp8_values)


def test_mxfp4_and_a_part_of_the_experts(tmp_path):
    torch.manual_seed(0)
    packed, exponents, values = fp4_blocks(torch.randn(3, 40, 64))
    blocks = packed.unflatten(-1, (-1, 16)).contiguous()
    tensors = {GPT_OSS + "_blocks": blocks, GPT_OSS + "_scales": exponents, GPT_OSS + "_bias": torch.ones(3, 40)}
    index = index_of(tmp_path, tensors, MXFP4)
    assert index.shapes == {GPT_OSS + "_bias": (3, 40), GPT_OSS: (3, 64, 40)}
    whole = index.read(GPT_OSS)
    assert torch.equal(whole, values.transpose(1, 2).bfloat16())
    assert torch.equal(whole, convert_moe_packed_tensors(blocks, exponents))
    assert torch.equal(index.read(GPT_OSS, slice(1, 3)), whole[1:3])
    assert torch.equal(index.read(GPT_OSS + "_bias", slice(1, 3)), torch.ones(2, 40))


def test_all_codes():
    """Every byte of FP4, and every one of FP8 that is a number, at scales from one end of float32 to the other."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    exponents = torch.tensor([[1, 64, 127, 128, 200, 240, 250, 127] * 2], dtype=torch.uint8)
    scales = torch.exp2(exponents.double() - 127)
    read = block_formats.FP4.decode(codes.view(torch.int8), exponents.view(torch.float8_e8m0fnu), torch.bfloat16)
    table = torch.tensor(Fp8Dequantize._FP4_E2M1_LUT, dtype=torch.float64)
    expected = torch.stack((table[codes.long() & 15], table[codes.long() >> 4]), -1).view(1, 16, 32) * scales[..., None]
    assert torch.equal(read.double(), expected.view(1, 512))
    (fp8, _) = block_formats.block_formats(FP8)
    numbers = codes[:, (codes & 127).flatten() != 127].view(torch.float8_e4m3fn)
    read = fp8.decode(numbers, torch.full((1, 2), 2.0**-20), torch.bfloat16)
    assert torch.equal(read.double(), numbers.double() * 2.0**-20)


def test_codes_without_scales_and_scales_of_another_size_are_refused(tmp_path):
    codes, scales, _ = fp8_blocks(torch.randn(200, 300))
    with pytest.raises(ValueError, match="a.weight is F8_E4M3, and has no scales a.weight_scale_inv or a.scale"):
        index_of(tmp_path, {"a.weight": codes})
    with pytest.raises(
        ValueError, match=r"_scale_inv has shape \[2, 3\], and a.weight, .* needs \[4, 5\] in blocks of"
    ):
        index_of(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scales}, FP8 | {"weight_block_size": [64, 64]})


def test_codes_that_config_json_does_not_explain_stay_what_they_are(tmp_path):
    codes, scales, _ = fp8_blocks(torch.randn(128, 128))
    index = index_of(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scales}, None)
    assert index.dtypes == {"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"} and not index.quantised
