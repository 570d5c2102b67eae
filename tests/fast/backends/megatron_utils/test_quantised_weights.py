"""A quantised checkpoint fills each rank's part of a model with the bits of the bf16 checkpoint that it stands for."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.hf_weights import check_names_and_shapes, held_entries, load_into
from miles.hf import block_formats
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.hf.deepseek_v4_hub import draw_experts, save_hub_checkpoint
from miles.hf.families.deepseek_v4 import HEAVY, SPARSE
from tests.fast.backends.megatron_utils.families.data.deepseek_v3 import DEEPSEEK
from tests.fast.backends.megatron_utils.families.data.deepseek_v4 import tiny as tiny_v4
from tests.fast.backends.megatron_utils.families.data.gpt_oss import GPT_OSS
from tests.fast.backends.megatron_utils.families.record import SIZES
from tests.fast.backends.megatron_utils.test_hf_weights import Holder, place
from tests.fast.quantised import write_fp8, write_mxfp4, write_v4

# Widths of more than one block, and of parts of one.
WIDE = dict(hidden_size=160, intermediate_size=192, tie_word_embeddings=False)
QWEN3_MOE = SIZES | WIDE | dict(num_hidden_layers=2, num_experts=4, moe_intermediate_size=136, head_dim=40)
V4_CONFIG = tiny_v4(num_hidden_layers=2, layer_types=[SPARSE, HEAVY], mlp_layer_types=["hash_moe", "moe"])
CASES = {
    "deepseek_v3": (DeepseekV3Config(**DEEPSEEK | WIDE | dict(moe_intermediate_size=136)), write_fp8),
    "qwen3_moe": (Qwen3MoeConfig(**QWEN3_MOE), write_fp8),
    "deepseek_v4": (V4_CONFIG, write_v4),
    "gpt_oss": (GptOssConfig(**GPT_OSS | dict(hidden_size=64, intermediate_size=32)), write_mxfp4),
}


@pytest.fixture(params=CASES)
def folders(request, tmp_path):
    config, write = CASES[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    if request.param == "deepseek_v4":
        draw_experts(model)
        save_hub_checkpoint(model, tmp_path / "source")
    else:
        model.save_pretrained(tmp_path / "source")
    write(tmp_path / "source", tmp_path / "quantised", tmp_path / "plain")
    return tmp_path / "quantised", tmp_path / "plain"


def loaded(folder, parallel, dtype):
    """The parameters of one rank that holds all layers."""
    hf_config = load_hf_config(folder)
    family = family_for(hf_config)
    entries = family.entries(hf_config, range(2), True, True, parallel.ep_size)
    shapes = {}
    for entry in held_entries(entries, parallel):
        whole = [torch.empty(shape, device="meta") for shape in entry.shapes]
        if entry.stacked:
            whole = [tensor[: len(tensor) // parallel.ep_size] for tensor in whole]
        rank, size = (0, 1) if entry.is_expert else (parallel.tp_rank, parallel.tp_size)
        part = entry.kind.split(whole, rank, size)
        shapes[entry.megatron_name] = part.shape if entry.expert is None else (entry.expert + 1, *part.shape)
    model = Holder(shapes, dtype)
    assert load_into([model], family, hf_config, folder, parallel) == len(shapes)
    return dict(model.named_parameters())


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_the_bits_of_the_bf16_checkpoint(folders, rank, monkeypatch):
    quantised, plain = folders
    parallel = place(tp=(rank, 2), ep_rank=rank, ep_size=2)
    ours, theirs = (loaded(folder, parallel, torch.bfloat16) for folder in folders)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and not ours[name].isnan().any() for name in ours)
    # A trainer in float32 has the products before they are rounded.
    wide = loaded(quantised, parallel, torch.float32)
    assert all(torch.equal(wide[name].bfloat16(), ours[name]) for name in ours)
    # The control: another scale shows.
    decode = block_formats.BlockFormat.decode
    monkeypatch.setattr(
        block_formats.BlockFormat,
        "decode",
        lambda self, c, s, dtype: decode(self, c, s.view(torch.uint8).flip(-1).view(s.dtype), dtype),
    )
    assert not all(
        torch.equal(value, ours[name]) for name, value in loaded(quantised, parallel, torch.bfloat16).items()
    )


def test_names_and_shapes_are_those_of_the_bf16_checkpoint(folders):
    quantised, plain = folders
    index, hf_config = CheckpointIndex(quantised), load_hf_config(quantised)
    assert index.quantised and index.shapes == CheckpointIndex(plain).shapes
    family = family_for(hf_config)
    entries = family.entries(hf_config, range(2), True, True)
    check_names_and_shapes(index, entries, family, hf_config)
