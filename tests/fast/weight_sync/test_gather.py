"""Gathering over real gloo groups: this file is also the program that each rank runs."""

import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from miles.backends.megatron_utils.hf import family_for, load_hf_config
from miles.backends.megatron_utils.hf.checkpoint_io import CheckpointIndex, load_into
from miles.weight_sync.export import save_hf
from miles.weight_sync.gather import ParallelInfo, hf_tensors, live, make_plan
from tests.fast.weight_sync.conftest import StageModel, fall_asleep, no_group


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
    config = load_hf_config(folder)
    stage, layers = parallel.pp_rank, parallel.stage_layers[parallel.pp_rank]
    first, last = stage == 0, stage == parallel.pp_size - 1
    model = StageModel(config, layers, first, last, parallel.tp_size, dtype)
    load_into(model, family_for(config), config, folder, layers, parallel.tp_rank, parallel.tp_size, first, last)
    return model, config


def check_gathered(folder, parallel):
    model, config = loaded_stage(folder, parallel)
    index = CheckpointIndex(folder)
    for read in (lambda _: live, fall_asleep):
        gathered = list(hf_tensors(model, family_for(config), config, parallel, index, read(model)))
        assert sorted(name for name, _ in gathered) == sorted(index.files)
        for name, tensor in gathered:
            assert torch.equal(tensor, index.read(name)), name


def one_process(layers=3):
    return ParallelInfo(0, 1, no_group, 0, 1, no_group, [range(layers)])


def main(rank, world_size, store, tp_size, root):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    pp_size = world_size // tp_size
    tp_rank, stage = rank % tp_size, rank // tp_size
    groups = {}

    def make_groups():
        tp_groups = [dist.new_group(range(s * tp_size, (s + 1) * tp_size)) for s in range(pp_size)]
        pp_groups = [dist.new_group(range(t, world_size, tp_size)) for t in range(tp_size)]
        groups.update(tp=tp_groups[stage], pp=pp_groups[tp_rank])

    stages = [range(3)] if pp_size == 1 else [range(0, 2), range(2, 3)]
    parallel = ParallelInfo(
        tp_rank,
        tp_size,
        (lambda: groups["tp"]) if tp_size > 1 else no_group,
        stage,
        pp_size,
        (lambda: groups["pp"]) if pp_size > 1 else no_group,
        stages,
    )
    for folder in (root / "untied", root / "tied"):
        # The groups that it asks for are those of now.
        make_groups()
        check_gathered(folder, parallel)
    model, config = loaded_stage(root / "tied", parallel)
    save_hf(root / "export", model, family_for(config), config, parallel, root / "tied", is_writer=rank == 0)
    dist.barrier()


@pytest.mark.parametrize("tp_size, pp_size", [(2, 1), (1, 2), (2, 2)])
def test_every_rank_gets_every_tensor(run_ranks, tmp_path, tp_size, pp_size):
    make_checkpoint(tmp_path / "untied")
    make_checkpoint(tmp_path / "tied", tied=True)
    run_ranks(__file__, tp_size * pp_size, str(tp_size), str(tmp_path))
    exported, source = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("export", "tied"))
    assert exported.dtype == source.dtype == torch.bfloat16
    for (name, value), expected in zip(exported.state_dict().items(), source.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("tied", [False, True])
def test_one_process_needs_no_groups(tmp_path, tied):
    check_gathered(make_checkpoint(tmp_path / "source", tied), one_process())


def test_touching_a_sleeping_parameter_would_be_noticed(tmp_path):
    folder = make_checkpoint(tmp_path / "source")
    model, config = loaded_stage(folder, one_process())
    fall_asleep(model)
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        next(hf_tensors(model, family_for(config), config, one_process(), CheckpointIndex(folder), live))


def test_what_was_read_is_dropped(tmp_path):
    folder = make_checkpoint(tmp_path / "source")
    model, config = loaded_stage(folder, one_process())
    given = []

    def read(parameter):
        assert all(storage() is None for storage in given)
        copy = parameter.detach().clone()
        given.append(weakref.ref(copy.untyped_storage()))
        return copy

    for _, tensor in hf_tensors(model, family_for(config), config, one_process(), CheckpointIndex(folder), read):
        del tensor
    assert len(given) == len(list(model.parameters()))


def test_a_tied_head_is_given_only_where_the_checkpoint_lists_it(tmp_path):
    folder = make_checkpoint(tmp_path / "source", tied=True)
    model, config = loaded_stage(folder, one_process())
    weights = {name: CheckpointIndex(folder).read(name).clone() for name in CheckpointIndex(folder).files}
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    gathered = dict(hf_tensors(model, family_for(config), config, one_process(), CheckpointIndex(folder), live))
    assert gathered.keys() == weights.keys()
    assert torch.equal(gathered["lm_head.weight"], weights["lm_head.weight"])


def test_all_is_checked_before_the_first_tensor(tmp_path):
    folder = make_checkpoint(tmp_path / "source")
    model, config = loaded_stage(folder, one_process())
    family, index = family_for(config), CheckpointIndex(folder)
    del index.files["model.norm.weight"]
    index.shapes["model.layers.0.mlp.up_proj.weight"] = (1, 2)
    index.files["other"] = index.files["lm_head.weight"]
    with pytest.raises(
        ValueError, match="missing: model.norm.weight; not of this model: other; other shapes: .*up_proj"
    ):
        hf_tensors(model, family, config, one_process(), index, live)
    with pytest.raises(ValueError, match="missing: model.norm.weight"):
        make_plan(family, config, [range(3)], index)
    del model.decoder.layers._modules["2"]
    with pytest.raises(ValueError, match="values without a parameter: decoder.layers.2"):
        hf_tensors(model, family, config, one_process(), CheckpointIndex(folder), live)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
