"""Converting checkpoints, from and to what published ones are."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig

from miles.hf import tensor_file
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.tools.convert import convert
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from tests.fast.backends.megatron_utils.families.data.gpt_oss import GPT_OSS
from tests.fast.quantised import fp8_blocks, is_fp8, write_fp8, write_mxfp4

SIZES = dict(hidden_size=256, num_layers=1, head_dim=64, intermediate_size=512)


@pytest.fixture
def source(tmp_path):
    make_tiny_checkpoint(tmp_path / "source", **SIZES)
    return tmp_path / "source"


@pytest.fixture
def fp8(source, tmp_path):
    write_fp8(source, tmp_path / "fp8", tmp_path / "plain")
    return tmp_path / "fp8"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("jobs", [1, 3])
def test_fp8_to_bf16(fp8, tmp_path, jobs, capsys):
    convert(fp8, tmp_path / "out", "bf16", jobs)
    index, plain = CheckpointIndex(tmp_path / "out"), CheckpointIndex(tmp_path / "plain")
    assert index.shapes == plain.shapes and index.dtypes == plain.dtypes and not index.quantised
    assert all(torch.equal(index.read(name), plain.read(name)) for name in plain.files)
    assert not hasattr(load_hf_config(tmp_path / "out"), "quantization_config")
    listed = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert listed["metadata"]["total_size"] == sum(2 * torch.Size(shape).numel() for shape in plain.shapes.values())
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / ".out.partial").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert all(torch.equal(model.state_dict()[name], plain.read(name)) for name in plain.files)
    printed = capsys.readouterr().out.splitlines()[-3:]
    assert printed == [
        "model-00001-of-00002.safetensors: 8 tensors, 5 of them converted",
        "model-00002-of-00002.safetensors: 5 tensors, 2 of them converted",
        f"wrote {tmp_path / 'out'}: 13 tensors in 2 files",
    ]


def test_mxfp4_to_bf16(tmp_path):
    model = AutoModelForCausalLM.from_config(GptOssConfig(**GPT_OSS | dict(hidden_size=64, intermediate_size=32)))
    model.save_pretrained(tmp_path / "source")
    write_mxfp4(tmp_path / "source", tmp_path / "mxfp4", tmp_path / "plain")
    convert(tmp_path / "mxfp4", tmp_path / "out", "bf16")
    index, plain = CheckpointIndex(tmp_path / "out"), CheckpointIndex(tmp_path / "plain")
    assert index.shapes == plain.shapes
    assert all(torch.equal(index.read(name), plain.read(name)) for name in plain.files)


def test_to_fp8(source, tmp_path):
    convert(source, tmp_path / "out", "fp8")
    index, weights = CheckpointIndex(tmp_path / "out"), load_file(source / "model.safetensors")
    assert index.shapes == {name: tuple(weight.shape) for name, weight in weights.items()}
    expected = {name: fp8_blocks(weight)[2] if is_fp8(name) else weight for name, weight in weights.items()}
    assert len(index.quantised) == 7
    assert all(torch.equal(index.read(name, dtype=torch.float32), value) for name, value in expected.items())
    way = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=way
    ).state_dict()
    assert all(torch.equal(model[name], value) for name, value in expected.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["quantization_config"]["modules_to_not_convert"] == ["model.embed_tokens"]
    # From FP8 to bf16 and back would lose more.
    with pytest.raises(ValueError, match="is quantised, and would lose twice: give the bf16 checkpoint"):
        convert(tmp_path / "out", tmp_path / "again", "fp8")


def test_a_run_that_was_ended_goes_on(fp8, tmp_path, monkeypatch, capsys):
    """Files that are whole, and of the same source, are kept."""
    write, written = tensor_file.TensorFile.write, []

    def fails_later(self, name, tensor):
        written.append(name)
        if len(written) == 12:
            raise OSError("no space left on device")
        write(self, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file.TensorFile, "write", fails_later)
        with pytest.raises(OSError, match="no space"):
            convert(fp8, tmp_path / "out", "bf16", jobs=1)
    partial = tmp_path / ".out.partial"
    (whole,) = contents(partial)
    assert not (tmp_path / "out").exists() and not list(partial.glob("*.partial"))
    capsys.readouterr()
    (partial / "of-another-run.safetensors").touch()
    convert(fp8, tmp_path / "out", "bf16")
    assert f"{whole}: kept" in capsys.readouterr().out
    assert not (tmp_path / "out" / "of-another-run.safetensors").exists()

    # A file that is damaged, or whose source changed, is written anew.
    (tmp_path / "out").rename(partial)
    first, second = sorted(partial.glob("*.safetensors"))
    second.write_bytes(second.read_bytes()[:-8])
    os.utime(fp8 / first.name, ns=(0, 0))
    convert(fp8, tmp_path / "out", "bf16")
    assert "kept" not in capsys.readouterr().out
    plain = CheckpointIndex(tmp_path / "plain")
    index = CheckpointIndex(tmp_path / "out")
    assert all(torch.equal(index.read(name), plain.read(name)) for name in plain.files)


def test_what_cannot_be_converted(source, fp8, tmp_path):
    with pytest.raises(ValueError, match="has no quantised weights: there is nothing to convert to bf16"):
        convert(source, tmp_path / "out", "bf16")
    with pytest.raises(ValueError, match="exists: name another folder"):
        convert(fp8, source, "bf16")
    with pytest.raises(ValueError, match="--jobs 0"):
        convert(fp8, tmp_path / "out", "bf16", 0)
    weights = {"experts.gate_up_proj": torch.ones(2, 4, 4), "q_proj.weight": torch.ones(4, 4)}
    (tmp_path / "fused").mkdir()
    for tensors, problem in (
        (weights, "experts in one tensor"),
        ({"a.weight": torch.ones(2, 2)}, "has no projections"),
        ({"a.q_proj.weight": torch.tensor([[float("inf")]])}, "a.q_proj.weight of .* has values that are not finite"),
    ):
        save_file(tensors, tmp_path / "fused" / "model.safetensors")
        with pytest.raises(ValueError, match=problem):
            convert(tmp_path / "fused", tmp_path / "out", "fp8")
