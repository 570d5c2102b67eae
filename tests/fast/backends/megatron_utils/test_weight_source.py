"""Gathering over real gloo groups: this file is also the program that each rank runs."""

import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.weight_source import MegatronWeights, merge_scratch, plan_entries
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.hf.entries import Entry
from miles.hf.layouts import Column
from miles.utils.agreement import Agreement
from miles.utils.errors import one_line
from miles.weight_sync.bucket import views
from miles.weight_sync.export import save_hf
from miles.weight_sync.format import CheckpointFormat
from miles.weight_sync.gather import Gatherer
from miles.weight_sync.live_bytes import LiveBytes
from miles.weight_sync.source import live
from tests.fast.weight_sync.conftest import (
    ExpertFamily,
    StageModel,
    alone,
    expert_checkpoint,
    expert_chunk,
    fall_asleep,
    grid,
    hf_tensors,
)


def make_checkpoint(folder, tied=False):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=67,  # odd: padded at TP 2
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.bfloat16().save_pretrained(folder)
    return folder


def loaded_stage(folder, parallel, dtype=torch.bfloat16):
    """The stage's model with the checkpoint's values, cut as its family's layouts cut them."""
    config = load_hf_config(folder)
    index, (layers,) = CheckpointIndex(folder), parallel.chunk_layers[parallel.pp_rank]
    first, last = parallel.pp_rank == 0, parallel.pp_rank == parallel.pp_size - 1
    model = StageModel(config, layers, first, last, parallel.tp_size, dtype)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for entry in family_for(config).entries(config, layers, first, last):
            tensors = [index.read(name) for name in entry.hf_names]
            parameters[entry.megatron_name].copy_(entry.kind.split(tensors, parallel.tp_rank, parallel.tp_size))
    return model, config


def names(planned):
    return [name for each in planned for name in each.shapes]


def check_gathered(folder, parallel):
    model, config = loaded_stage(folder, parallel)
    index = CheckpointIndex(folder)
    for read in (lambda _: live, fall_asleep):
        gathered = {}
        for name, tensor in hf_tensors([model], family_for(config), config, parallel, index, read(model)):
            assert name not in gathered
            gathered[name] = tensor.clone()
        assert gathered.keys() == index.files.keys()
        for name, tensor in gathered.items():
            assert torch.equal(tensor, index.read(name)), name


def main(rank, world_size, store, root, *sizes):
    """sizes: as `tp=2`. What every rank gathers of ExpertFamily, awake and asleep, within the memory it may take."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    sizes = {name: int(value) for name, value in (size.split("=") for size in sizes)}
    parallel = grid(dist.new_group, rank, world_size, **sizes)
    if not {"ep", "etp", "chunks"} & sizes.keys():
        for folder in (root / "untied", root / "tied"):
            check_gathered(folder, grid(dist.new_group, rank, world_size, **sizes, layers=3))
        tied = grid(dist.new_group, rank, world_size, **sizes, layers=3)
        model, config = loaded_stage(root / "tied", tied)
        weights = MegatronWeights([model], family_for(config), config, tied, CheckpointIndex(root / "tied"))
        agreement = Agreement(dist.group.WORLD)
        save_hf(root / "export", weights, rank == 0, agreement)
    index, config = CheckpointIndex(root / "experts"), load_hf_config(root / "experts")
    chunks = [expert_chunk(index, parallel, n) for n in range(len(parallel.chunk_layers[0]))]
    order = names(plan_entries(ExpertFamily(), config, alone(4), index))
    for limit in (12_000, 200_000):
        source = MegatronWeights(chunks, ExpertFamily(), config, parallel, index, copies=True)
        gatherer = Gatherer(source, CheckpointFormat(), limit)
        assert names(source.planned) == order
        assert (len(gatherer.buckets) > 4) == (limit == 12_000)
        for asleep in (False, True):
            source.read = fall_asleep(*chunks) if asleep else live
            gathered = {}
            for bucket in gatherer.buckets:
                flat = torch.empty(bucket.nbytes, dtype=torch.uint8)
                gatherer.fill(bucket, flat, everywhere=True)
                gathered |= {name: tensor.clone() for name, tensor in views(bucket, flat).items()}
            assert sorted(gathered) == sorted(index.files)
            for name, tensor in gathered.items():
                assert torch.equal(tensor, index.read(name)) and tensor.dtype == index.read(name).dtype, name
        chunks = [expert_chunk(index, parallel, n) for n in range(len(parallel.chunk_layers[0]))]
    if parallel.pp_size == 1:
        fail_to_read(rank, gatherer, expert_chunk(index, parallel, 0))


def fail_to_read(rank, gatherer, chunk):
    """One rank of the group can't read one parameter: it says so, and the others' calls come to their end."""
    broken = chunk.get_parameter("decoder.layers.1.q_a")

    def read(parameter, expert=None):
        if rank == 1 and parameter is broken:
            raise OSError("injected")
        return live(parameter, expert)

    gatherer.source.read = read
    parameters = dict(chunk.named_parameters())
    held = gatherer.source.held
    held.update({key: parameters[key[1].megatron_name] for key in held})
    failures = [
        one_line(failure)
        for bucket in gatherer.buckets
        for failure in [gatherer.fill(bucket, torch.empty(bucket.nbytes, dtype=torch.uint8), everywhere=True)]
        if failure is not None
    ]
    assert failures == (["OSError: injected; decoder.layers.1.q_a could not be read"] if rank == 1 else [])


@pytest.mark.parametrize(
    "world_size, sizes",
    [
        (2, "tp=2"),
        (2, "ep=2 etp=1 tp=2"),
        (2, "tp=1 ep=1 etp=2"),
        (4, "tp=2 pp=2"),
        (4, "ep=2 etp=2 tp=2"),
        (4, "ep=4"),
        (4, "pp=2 ep=2 chunks=2"),
    ],
)
def test_every_rank_gets_every_tensor(run_ranks, tmp_path, world_size, sizes):
    make_checkpoint(tmp_path / "untied")
    make_checkpoint(tmp_path / "tied", tied=True)
    expert_checkpoint(tmp_path / "experts")
    run_ranks(__file__, world_size, str(tmp_path), *sizes.split())
    if not (tmp_path / "export").exists():
        return
    exported, source = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("export", "tied"))
    assert exported.dtype == source.dtype == torch.bfloat16
    for (name, value), expected in zip(exported.state_dict().items(), source.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("sizes", [dict(), dict(tp_size=2), dict(etp_size=2), dict(tp_size=2, etp_size=2)])
def test_a_bucket_and_its_making_stay_within_the_limit(tmp_path, monkeypatch, sizes, asleep):
    """With a stand-in for the gather of two ranks: gloo's thread lets go of a call's tensors only after its end."""
    monkeypatch.setattr(
        dist, "all_gather_into_tensor", lambda shards, own, group: shards.view(2, -1).copy_(own.expand(2, -1))
    )
    config, index = expert_checkpoint(tmp_path / "experts"), CheckpointIndex(tmp_path / "experts")
    parallel = replace(alone(4), **sizes, tp_group=lambda: None, etp_group=lambda: None)
    chunk = expert_chunk(index, parallel, 0)
    read = fall_asleep(chunk) if asleep else live
    source = MegatronWeights([chunk], ExpertFamily(), config, parallel, index, read, copies=asleep)
    gatherer = Gatherer(source, CheckpointFormat(), 12_000)
    assert len(gatherer.buckets) > 4
    for bucket in gatherer.buckets:
        with LiveBytes() as counted:
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8)
            gatherer.fill(bucket, flat, everywhere=True)
        assert bucket.nbytes <= counted.peak <= bucket.nbytes + bucket.scratch
        assert 2 * bucket.capacity + bucket.scratch <= 24_000


@pytest.mark.parametrize("tied", [False, True])
def test_one_process_needs_no_groups(tmp_path, tied):
    check_gathered(make_checkpoint(tmp_path / "source", tied), alone(3))


def test_touching_a_sleeping_parameter_would_be_noticed(tmp_path):
    folder = make_checkpoint(tmp_path / "source")
    model, config = loaded_stage(folder, alone(3))
    fall_asleep(model)
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        next(hf_tensors([model], family_for(config), config, alone(3), CheckpointIndex(folder), live))


def test_what_was_read_is_dropped(tmp_path):
    folder = make_checkpoint(tmp_path / "source")
    model, config = loaded_stage(folder, alone(3))
    given = []

    def read(parameter, expert=None):
        assert all(storage() is None for storage in given)
        copy = parameter.detach().clone()
        given.append(weakref.ref(copy.untyped_storage()))
        return copy

    for _, tensor in hf_tensors([model], family_for(config), config, alone(3), CheckpointIndex(folder), read):
        del tensor
    assert len(given) == len(list(model.parameters()))


def test_a_tied_head_is_given_only_where_the_checkpoint_lists_it(tmp_path):
    folder = make_checkpoint(tmp_path / "source", tied=True)
    model, config = loaded_stage(folder, alone(3))
    weights = {name: CheckpointIndex(folder).read(name).clone() for name in CheckpointIndex(folder).files}
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    gathered = dict(hf_tensors([model], family_for(config), config, alone(3), CheckpointIndex(folder), live))
    assert torch.equal(gathered["lm_head.weight"], gathered["model.embed_tokens.weight"])


def test_a_difference_is_refused_before_anything_is_given(tmp_path):
    folder = make_checkpoint(tmp_path / "source")
    model, config = loaded_stage(folder, alone(3))
    family, index = family_for(config), CheckpointIndex(folder)
    del index.files["model.norm.weight"]
    index.shapes["model.layers.0.mlp.up_proj.weight"] = (1, 2)
    index.files["other"] = index.files["lm_head.weight"]
    with pytest.raises(
        ValueError, match="missing: model.norm.weight; not of this model: other; other shapes: .*up_proj"
    ):
        hf_tensors([model], family, config, alone(3), index, live)
    with pytest.raises(ValueError, match="missing: model.norm.weight"):
        plan_entries(family, config, alone(3), index)
    del model.decoder.layers._modules["2"]
    with pytest.raises(ValueError, match="values without a parameter: decoder.layers.2"):
        hf_tensors([model], family, config, alone(3), CheckpointIndex(folder), live)


def test_nothing_to_send_is_refused(tmp_path):
    class Empty(ExpertFamily):
        def entries(self, *_):
            return []

    config = expert_checkpoint(tmp_path / "experts")
    with pytest.raises(ValueError, match="Empty lists no weights at all"):
        plan_entries(Empty(), config, alone(4), CheckpointIndex(tmp_path / "experts"))


def test_shards_count_while_they_are_gathered():
    """At TP 2: all shards, and their halves' own copy or the joined tensor."""
    entry = Entry(Column(), "a", ("a",), ((8, 100),))
    assert 1600 <= merge_scratch(entry, torch.uint8, 2, limit=160, copies=True) <= 2100


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
