"""What config.json says of quantised weights."""

import json

import pytest

from miles.hf.quantization import quantization_in, quantization_problem

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("read", [None, BLOCKS, BLOCKS | {"fmt": "float8_e4m3fn"}, {"quant_method": "mxfp4"}])
def test_what_is_read(read):
    assert quantization_problem(read) is None


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method='awq' (AWQ, 4 bits) is not read; give one in bf16"),
        ({"quant_method": "gptq"}, "(GPTQ, 4 bits)"),
        ({"quant_method": "compressed-tensors"}, "among them INT4"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "new"}, "quant_method='new' is not read"),
        ({"quant_method": "fp8"}, "'fp8' without weight_block_size (one scale for a whole tensor) is not read"),
        (BLOCKS | {"fmt": "e5m2"}, "'fp8' with fmt='e5m2' is not read"),
    ],
)
def test_what_is_refused_by_name(other, sentence):
    assert sentence in quantization_problem(other)


def test_where_it_stands(tmp_path):
    file = tmp_path / "config.json"
    assert quantization_in(tmp_path) is None
    for fields in (
        {"quantization_config": BLOCKS},
        {"compression_config": BLOCKS},
        {"text_config": {"quantization_config": BLOCKS}},
    ):
        file.write_text(json.dumps(fields))
        assert quantization_in(tmp_path) == BLOCKS
    file.write_text("{}")
    assert quantization_in(tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert "ModelOpt" in quantization_problem(quantization_in(tmp_path))
