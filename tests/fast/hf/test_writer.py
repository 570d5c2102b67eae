"""What stands beside the weights of an export."""

import json
import os

import pytest
import torch

from miles.hf.writer import HFWriter


def source_of(tmp_path):
    """The checkpoint that an export begins from, as far as the writer reads it."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_writer_copies_all_that_is_no_weight(tmp_path):
    folder, out = source_of(tmp_path), tmp_path / "out"
    kept = ("modeling_own.py", "qwen.tiktoken", "vocab.bpe", "chat_template.jinja", "additional_chat_templates/a.jinja")
    left = ("pytorch_model.bin", "pytorch_model.bin.index.json", "original/consolidated.00.pth", ".gitattributes")
    for name in (*kept, *left):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    with HFWriter(out, folder) as writer:
        writer.write("a", torch.ones(1))
    index = "model.safetensors.index.json"
    weights = {index, "model-00001-of-00001.safetensors"}
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {*kept, *weights, "config.json"}


def test_an_export_of_a_quantised_checkpoint_does_not_say_that_it_is_one(tmp_path):
    folder, out = source_of(tmp_path), tmp_path / "out"
    quantised = {"quantization_config": {"quant_method": "fp8"}, "a": 1}
    (folder / "config.json").write_text(json.dumps(quantised | {"expert_dtype": "fp4", "text_config": quantised}))
    with HFWriter(out, folder) as writer:
        writer.write("w", torch.ones(1))
    fields = {"a": 1, "dtype": "float32"}
    assert json.loads((out / "config.json").read_text()) == fields | {"text_config": fields}


@pytest.mark.parametrize(
    "written, said",
    [
        ({"w": torch.bfloat16, "gate": torch.float32}, "bfloat16"),
        ({"w": torch.float32, "gate": torch.bfloat16}, "float32"),
    ],
)
def test_the_config_says_the_type_of_most_weights(tmp_path, written, said):
    """One gate in float32 must not make an engine take the rest for float32, which it would read as float16."""
    folder, out = source_of(tmp_path), tmp_path / "out"
    config = json.loads((folder / "config.json").read_text())
    config |= {"torch_dtype": "float16", "text_config": {"dtype": "float16", "hidden_size": 32}}
    (folder / "config.json").write_text(json.dumps(config))
    with HFWriter(out, folder) as writer:
        writer.write("gate", torch.ones(2, dtype=written["gate"]))
        writer.write("w", torch.ones(100, dtype=written["w"]))
        writer.write("positions", torch.ones(1000, dtype=torch.int64))
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["text_config"]) == (said, {"dtype": said, "hidden_size": 32})
    assert "torch_dtype" not in config


def test_others_may_read_an_export_as_the_umask_says(tmp_path):
    folder, out = source_of(tmp_path), tmp_path / "out"
    before = os.umask(0o027)
    try:
        with HFWriter(out, folder) as writer:
            writer.write("a", torch.ones(1))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}
