"""Writing tiny checkpoints in the formats that quantised ones are published in, block by block and in plain Python."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_blocks(weight, block=128, power_of_two=False):
    """Codes, scales and the float32 values that they stand for, of a matrix."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block), -(-columns // block))
    values = torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale = weight[here].abs().max().item() / 448 or 1.0
            scale = 2.0 ** torch.tensor(scale).log2().ceil().item() if power_of_two else scale
            scales[i, j] = scale
            codes[here] = (weight[here].float() / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
            values[here] = codes[here].float() * scales[i, j]
    return codes, scales, values


def fp4_blocks(weight):
    """Bytes with two codes each, exponents of scales as bytes, and the values, of [..., columns]."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp(min=2.0**-20) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = (scaled[..., None] - table).abs().argmin(-1)
    values = (table[codes] * exponents.exp2()[..., None]).flatten(-2)
    codes = codes.flatten(-2).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8), values


def is_fp8(name):
    return name.endswith("_proj.weight")


def write_fp8(source: Path, quantised: Path, plain: Path, power_of_two=False) -> None:
    """Projections as FP8 in `quantised`, over two files, and as the bf16 that they stand for in `plain`."""
    codes, values = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if is_fp8(name):
            codes[name], codes[name + "_scale_inv"], value = fp8_blocks(weight, power_of_two=power_of_two)
            values[name] = value.bfloat16()
        else:
            codes[name] = values[name] = weight.bfloat16()
    _write(source, quantised, codes, FP8)
    _write(source, plain, values, None)


def write_mxfp4(source: Path, quantised: Path, plain: Path) -> None:
    """As `write_fp8`, of gpt-oss: its experts' stacks [E, columns, rows] as MXFP4."""
    codes, values = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed, codes[name + "_scales"], value = fp4_blocks(weight.transpose(1, 2))
            codes[name + "_blocks"] = packed.unflatten(-1, (-1, 16)).contiguous()
            values[name] = value.transpose(1, 2).bfloat16().contiguous()
        else:
            codes[name] = values[name] = weight.bfloat16()
    _write(source, quantised, codes, MXFP4)
    _write(source, plain, values, None)


def write_v4(source: Path, quantised: Path, plain: Path) -> None:
    """As `write_fp8`, of DeepSeek-V4 as the hub has it: experts as FP4, projections as FP8, scales powers of two."""
    codes, values = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        scale = name.removesuffix("weight") + "scale"
        if ".ffn.experts." in name:
            packed, exponents, value = fp4_blocks(weight)
            codes[name], codes[scale] = packed.view(torch.int8), exponents.view(torch.float8_e8m0fnu)
        elif name.endswith(("wq_a.weight", "wq_b.weight", "attn.wkv.weight", "wo_a.weight", "wo_b.weight")):
            codes[name], scales, value = fp8_blocks(weight, power_of_two=True)
            codes[scale] = scales.to(torch.float8_e8m0fnu)
        else:
            codes[name] = value = weight
        values[name] = value.bfloat16() if scale in codes else value
    _write(source, quantised, codes, FP8 | {"scale_fmt": "ue8m0"})
    _write(source, plain, values, None)


def _write(source, folder, tensors, quantization):
    """Files of every second tensor, so that codes and scales lie apart."""
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            (folder / path.name).write_bytes(path.read_bytes())
    weight_map = {}
    for number in range(2):
        names = sorted(tensors)[number::2]
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
