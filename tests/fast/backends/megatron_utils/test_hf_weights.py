import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from miles.backends.megatron_utils.families import Family, family_for
from miles.backends.megatron_utils.hf_weights import load_into
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.hf.entries import Entry
from miles.hf.layouts import Column, Replicated
from miles.hf.parallel import ParallelInfo, no_group
from miles.hf.writer import HFWriter

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


def place(chunk_layers=((range(2),),), stage=0, tp=(0, 1), **experts):
    """A rank's place: [stage][chunk] layers, its stage, and (rank, size) of tensor parallelism."""
    return ParallelInfo(*tp, no_group, stage, len(chunk_layers), no_group, chunk_layers, **experts)


STAGES = ((range(0, 1),), (range(1, 2),))


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
            parallel = place(STAGES, layers.start, (rank, tp_size))
            filled = load_into([model], family, config, checkpoint, parallel)
            parameters = dict(model.named_parameters())
            assert filled == len(parameters)
            for entry in family.entries(config, layers, first, last):
                expected = entry.kind.split([weights[n] for n in entry.hf_names], rank, tp_size)
                assert torch.equal(parameters[entry.megatron_name], expected.double())


def test_a_tied_head_on_a_later_stage_gets_the_embedding(tmp_path):
    folder = save_model(tmp_path / "tied", LlamaConfig, tie_word_embeddings=True)
    config = load_hf_config(folder)
    model = Holder(stage_shapes(config, range(1, 2), False, True, 2))
    load_into([model], family_for(config), config, folder, place(STAGES, 1, (1, 2)))
    table = CheckpointIndex(folder).read("model.embed_tokens.weight")
    head = model.output_layer.weight
    assert torch.equal(head[:33], table[34:]) and head[33].eq(0).all()


def load_whole(folder, shapes=None):
    config = load_hf_config(folder)
    model = Holder(stage_shapes(config, range(2), True, True, 1) if shapes is None else shapes)
    return load_into([model], family_for(config), config, folder, place())


def test_interleaved_chunks_are_filled(tmp_path):
    folder = save_model(tmp_path / "source", LlamaConfig, num_hidden_layers=4, tie_word_embeddings=True)
    config, weights = load_hf_config(folder), weights_of(folder)
    layers = ((range(0, 1), range(2, 3)), (range(1, 2), range(3, 4)))
    chunks = [Holder(stage_shapes(config, layers[1][0], False, False, 1))]
    chunks.append(Holder(stage_shapes(config, layers[1][1], False, True, 1)))
    load_into(chunks, family_for(config), config, folder, place(layers, 1))
    for chunk, layer in zip(chunks, (1, 3), strict=True):
        expected = weights[f"model.layers.{layer}.mlp.down_proj.weight"]
        assert torch.equal(chunk.decoder.layers._modules["0"].mlp.linear_fc2.weight, expected)
    assert torch.equal(chunks[1].output_layer.weight, weights["model.embed_tokens.weight"])


class Experts(Family):
    """Four experts, their first projections one name each or all in one tensor, and a bias that all ranks hold."""

    def entries(self, hf_config, layers, first_stage, last_stage, ep_size=1):
        if hf_config.stacked:
            return [Entry(Rows(), "experts.weight", ("experts",), ((4, 6, 2),), stacked=True)]
        return [
            Entry(Replicated(), "bias", ("bias",), ((3,),)),
            *(
                Entry(
                    Column(),
                    "experts.weight",
                    (f"expert_{e}",),
                    ((6, 2),),
                    ep_rank=e // (4 // ep_size),
                    expert=e % (4 // ep_size),
                )
                for e in range(4)
            ),
        ]


class Rows:
    """Rows of stacked experts [E, O, I] are cut evenly."""

    sharded = True

    def split(self, tensors, rank, size):
        return tensors[0].chunk(size, dim=1)[rank]


@pytest.mark.parametrize("stacked", [False, True])
def test_a_rank_reads_its_own_experts(tmp_path, stacked, monkeypatch):
    weights = torch.randn(4, 6, 2)
    tensors = {"experts": weights} if stacked else {f"expert_{e}": weights[e].clone() for e in range(4)}
    if not stacked:
        tensors["bias"] = torch.randn(3)
    save_file(tensors, tmp_path / "model.safetensors")
    config = PreTrainedConfig(num_hidden_layers=1, tie_word_embeddings=False, stacked=stacked)
    read, whole = set(), CheckpointIndex.read
    monkeypatch.setattr(CheckpointIndex, "read", lambda self, name, *how: (read.add(name), whole(self, name, *how))[1])
    model = Holder({"experts.weight": (2, 3, 2)} | ({} if stacked else {"bias": (3,)}))
    # Tensor parallelism of its own: the second half of an expert's rows on a rank with whole other layers.
    parallel = place(((range(1),),), tp=(0, 1), ep_rank=1, ep_size=2, etp_rank=1, etp_size=2)
    assert load_into([model], Experts(), config, tmp_path, parallel) == len(list(model.parameters()))
    for local, expert in enumerate((2, 3)):
        assert torch.equal(model.experts.weight[local], weights[expert, 3:])
    assert read == ({"experts"} if stacked else {"bias", "expert_2", "expert_3"})


def test_peak_memory_is_one_file_and_one_tensor(run_ranks, tmp_path):
    """In a process of its own; a parameter of two tensors lies in two files."""
    columns, rows, per_file, files = 1024, 2048, 4, 6
    weight_map = {}
    for file in range(files):
        names = [f"{file * per_file + i}" for i in range(per_file)]
        save_file({name: torch.rand(rows, columns) for name in names}, tmp_path / f"{file}.safetensors")
        weight_map |= dict.fromkeys(names, f"{file}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    run_ranks(__file__, 1, str(tmp_path))
    before, after, peak = json.loads((tmp_path / "bytes.json").read_text())
    tensor = 4 * columns * rows
    # The allocator may keep what one copy took.
    assert after - before < 1.2 * tensor, "what was read stays in memory"
    # A file, and a tensor of the file before; each is copied on its way into the parameter. Some may be memory that the
    # process had before.
    print(f"peak: {(peak - before) / tensor:.2f} tensors, of which {per_file} are a file")
    assert (per_file - 0.5) * tensor < peak - before < (per_file + 2.2) * tensor


class FirstRows:
    """Keeps one row of each tensor, after it has gone through all of them."""

    sharded = False

    def split(self, tensors, rank, size):
        return torch.stack([tensor.clone()[0] for tensor in tensors])


class Large(Family):
    """A parameter for each tensor, but one for the fourth and fifth, which two files have."""

    def entries(self, hf_config, *_):
        groups = [[name] for name in hf_config.names if name not in ("3", "4")] + [["3", "4"]]
        shape = tuple(hf_config.shape)
        return [Entry(FirstRows(), "all." + "_".join(names), tuple(names), (shape,) * len(names)) for names in groups]


def measure_loading(folder):
    """Writes the bytes in memory before and after loading, and the most between."""
    index = CheckpointIndex(folder)
    shape = index.shapes["0"]
    config = PreTrainedConfig(num_hidden_layers=1, tie_word_embeddings=False, names=list(index.files), shape=shape)
    entries = Large().entries(config)
    model = Holder({entry.megatron_name: (len(entry.hf_names), shape[1]) for entry in entries})

    def resident(field):
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[field].split()[0]) * 1024

    for _ in range(2):  # the first time everything that loading uses comes into memory
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        load_into([model], Large(), config, folder, place(((range(1),),)))
    (folder / "bytes.json").write_text(json.dumps([before, resident("VmRSS"), resident("VmHWM")]))


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


def test_what_is_rounded_is_said(tmp_path, caplog):
    folder = save_model(tmp_path, LlamaConfig)
    config = load_hf_config(folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    half = {key: value if key == name else value.bfloat16() for key, value in weights.items()}

    def said(saved, dtype):
        save_file(saved, folder / "model.safetensors")
        caplog.clear()
        load_into(
            [Holder(stage_shapes(config, range(2), True, True, 1), dtype)], family_for(config), config, folder, place()
        )
        return [record.getMessage() for record in caplog.records if "rounded" in record.getMessage()]

    (message,) = said(half, torch.bfloat16)
    assert "1 weights" in message
    assert name in message
    assert not said(half, torch.float32)
    assert not said(weights, torch.bfloat16)  # all of it, as --bf16 asks for


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
    with pytest.raises(FileNotFoundError), HFWriter(out, tmp_path / "gone") as writer:  # at the very end
        writer.write("a", torch.ones(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    for value in (1.0, 2.0):
        with HFWriter(out, folder) as writer:
            writer.write("a", torch.full((1,), value))
    assert CheckpointIndex(out).read("a").item() == 2
    with pytest.raises(ValueError, match="name another folder"):
        HFWriter(folder, folder)


if __name__ == "__main__":
    measure_loading(Path(sys.argv[4]))
