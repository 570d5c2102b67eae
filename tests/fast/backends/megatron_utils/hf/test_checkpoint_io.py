import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from miles.backends.megatron_utils.hf import family_for, load_hf_config
from miles.backends.megatron_utils.hf.checkpoint_io import CheckpointIndex, HFWriter, load_into

SIZES = dict(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


class Holder(torch.nn.Module):
    """A module with parameters of given names (dots allowed), in place of a GPTModel."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, torch.nn.Parameter(torch.full(shape, float("nan"), dtype=dtype)))


def stage_shapes(config, layers, first, last, tp_size):
    entries = family_for(config).entries(config, layers, first, last)
    return {e.megatron_name: e.kind.split([torch.empty(s) for s in e.shapes], 0, tp_size).shape for e in entries}


@pytest.fixture(params=["sharded", "single"])
def checkpoint(tmp_path, request):
    return save_model(tmp_path / "source", Qwen2Config, "20KB" if request.param == "sharded" else "1GB")


def save_model(folder, kind, max_shard_size="1GB", **changes):
    torch.manual_seed(0)
    config = kind(**{**SIZES, "tie_word_embeddings": False, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_index_names_shapes_and_values(checkpoint):
    index, weights = CheckpointIndex(checkpoint), weights_of(checkpoint)
    assert index.shapes == {name: tuple(value.shape) for name, value in weights.items()}
    assert set(index.dtypes.values()) == {"F32"}
    assert all(torch.equal(index.read(name), weights[name]) for name in weights)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_load_reads_what_each_rank_and_stage_holds(checkpoint, tp_size):
    config, weights = load_hf_config(checkpoint), weights_of(checkpoint)
    family = family_for(config)
    for layers, first, last in ((range(0, 1), True, False), (range(1, 2), False, True)):
        for rank in range(tp_size):
            model = Holder(stage_shapes(config, layers, first, last, tp_size), dtype=torch.float64)
            filled = load_into(model, family, config, checkpoint, layers, rank, tp_size, first, last)
            parameters = dict(model.named_parameters())
            assert filled == len(parameters)
            for entry in family.entries(config, layers, first, last):
                expected = entry.kind.split([weights[n] for n in entry.hf_names], rank, tp_size)
                assert torch.equal(parameters[entry.megatron_name], expected.double())


def test_a_tied_head_on_a_later_stage_gets_the_embedding(tmp_path):
    folder = save_model(tmp_path / "tied", LlamaConfig, tie_word_embeddings=True)
    config = load_hf_config(folder)
    model = Holder(stage_shapes(config, range(1, 2), False, True, 2))
    load_into(model, family_for(config), config, folder, range(1, 2), 1, 2, False, True)
    table = CheckpointIndex(folder).read("model.embed_tokens.weight")
    head = model.output_layer.weight
    assert torch.equal(head[:33], table[34:]) and head[33].eq(0).all()


def load_whole(folder, shapes=None):
    config = load_hf_config(folder)
    model = Holder(stage_shapes(config, range(2), True, True, 1) if shapes is None else shapes)
    return load_into(model, family_for(config), config, folder, range(2), 0, 1, True, True)


def rewrite(folder, change):
    tensors = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), "missing: model.layers.1.self_attn.k_proj.bias"),
        (lambda t: t.update(extra=torch.zeros(1)), "not of this model: extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"model.norm.weight \[31\].*\[32\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "model.norm.weight I8"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, change, message):
    folder = save_model(tmp_path / "source", Qwen2Config)
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        load_whole(folder)


def test_old_rotary_buffers_are_no_weights(tmp_path):
    folder = save_model(tmp_path / "source", LlamaConfig)
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert load_whole(folder) == 15


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    folder = save_model(tmp_path / "source", LlamaConfig)
    shapes = stage_shapes(load_hf_config(folder), range(2), True, True, 1)
    with pytest.raises(ValueError, match="parameters without a value: more"):
        load_whole(folder, {**shapes, "more": (3,)})
    del shapes["output_layer.weight"]
    with pytest.raises(ValueError, match="values without a parameter: output_layer.weight"):
        load_whole(folder, shapes)
    with pytest.raises(ValueError, match=r"output_layer.weight has shape \[68, 32\]"):
        load_whole(folder, {**shapes, "output_layer.weight": (68, 32)})


def test_broken_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neither"):
        CheckpointIndex(tmp_path)
    with pytest.raises(ValueError, match="config.json"):
        load_hf_config(tmp_path)
    folder = save_model(tmp_path / "source", LlamaConfig)
    whole = (folder / "model.safetensors").read_bytes()
    for cut in (4, 100, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="download it again"):
            CheckpointIndex(folder)
    sharded = save_model(tmp_path / "sharded", LlamaConfig, "20KB")
    first = next(sharded.glob("model-00001-of-*"))
    first.unlink()
    with pytest.raises(ValueError, match=first.name):
        CheckpointIndex(sharded)


def test_writer_makes_a_checkpoint_that_transformers_loads(checkpoint, tmp_path):
    (checkpoint / "tokenizer.json").write_text("{}")
    weights, out = weights_of(checkpoint), tmp_path / "exports" / "step_1"
    with HFWriter(out, checkpoint, max_shard_bytes=20_000) as writer:
        for name, tensor in weights.items():
            writer.write(name, tensor.bfloat16())
        assert not out.exists()
    back = AutoModelForCausalLM.from_pretrained(out)
    assert back.dtype == torch.bfloat16
    assert all(torch.equal(value, weights[name].bfloat16()) for name, value in back.state_dict().items())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) == 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(w.numel() * 2 for w in weights.values()) == writer.bytes_written
    assert {p.name for p in checkpoint.iterdir() if p.suffix == ".json"} - {"model.safetensors.index.json"} <= {
        p.name for p in out.iterdir()
    }


def test_writer_takes_views_of_one_storage_and_later_changes(tmp_path):
    folder = save_model(tmp_path / "source", LlamaConfig)
    table = torch.ones(4, 4)
    with HFWriter(tmp_path / "out", folder) as writer:
        writer.write("a", table.t())
        writer.write("b", table[:2])
        table.zero_()
        with pytest.raises(ValueError, match="a was written twice"):
            writer.write("a", table)
    index = CheckpointIndex(tmp_path / "out")
    assert index.read("a").eq(1).all() and index.read("b").eq(1).all()


def test_a_failed_export_leaves_nothing_and_only_exports_are_replaced(tmp_path):
    folder, out = save_model(tmp_path / "source", LlamaConfig), tmp_path / "out"
    with pytest.raises(RuntimeError), HFWriter(out, folder) as writer:
        writer.write("a", torch.ones(1))
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    for value in (1.0, 2.0):
        with HFWriter(out, folder) as writer:
            writer.write("a", torch.full((1,), value))
    assert CheckpointIndex(out).read("a").item() == 2
    with pytest.raises(FileExistsError, match="name another folder"):
        HFWriter(folder, folder)
