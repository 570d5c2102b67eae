"""Weights rebuilt from the masters of all data-parallel ranks. This file is also the program that each rank runs."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world


def test_weights_come_back_from_the_masters(run_ranks, tiny_checkpoint, tmp_path):
    run_ranks(__file__, 2, str(tiny_checkpoint), str(tmp_path), json.dumps(free_ports(3)))


def bits(tensor):
    return tensor.detach().clone().view(torch.int16)


def main(rank, checkpoint, folder, ports):
    torch.set_num_threads(1)
    # First each rank in a world of its own, then both in one.
    in_world(0, 1, checkpoint, folder / f"rank {rank}", ports[rank], check_refusals if rank else check_rebuild)
    in_world(rank, 2, checkpoint, folder / f"both, rank {rank}", ports[2], check_rebuild)


def in_world(rank, ranks, checkpoint, folder, port, check):

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor

    folder.mkdir()
    actor = MegatronTrainRayActor(loss_trace.trace_config(checkpoint, ranks, 1, ["--bf16"], folder), rank, ranks)
    actor.init(f"127.0.0.1:{port}")
    check(actor)
    leave_world()


def check_rebuild(actor):
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.masters import MasterWeights

    ranks, parameters = dist.get_world_size(), dict(actor.model.chunks[0].named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    started = {name: bits(parameter) for name, parameter in parameters.items()}

    # The optimizer's masters are asked for by `contents`, even while their own memory is away.
    copies = {}
    masters = MasterWeights(actor.model.state.chunks, actor.model.state.optimizer, lambda master: copies[master])
    (part,) = actor.model.state.optimizer.chained_optimizers
    own = [master for group in part.shard_fp32_from_float16_groups for master in group]
    if ranks > 1:
        ranges = {name: parameter in part.model_param_gbuf_map for name, parameter in parameters.items()}
        assert len(set(ranges.values())) == 2, "a parameter of which this rank holds nothing was meant to be here"

    def check():
        copies.update({master: master.detach().clone() for master in own})
        live = {name: bits(parameter) for name, parameter in parameters.items()}
        for tensor in [*parameters.values(), *own]:
            tensor.data.fill_(float("nan"))
        for name, parameter in parameters.items():
            value = masters.read(parameter)
            assert (value.shape, value.dtype) == (parameter.shape, parameter.dtype)
            assert torch.equal(bits(value), live[name]), name
            for row in some_rows(parameter):
                assert torch.equal(bits(masters.read(parameter, row)), live[name][row]), (name, row)
            assert parameter.isnan().all(), "read() wrote to the parameter"
        with torch.no_grad():
            for master in own:
                master.copy_(copies[master])
        masters.rebuild()
        for name, parameter in parameters.items():
            assert torch.equal(bits(parameter), live[name]), name
        return live

    check()
    shard = loss_trace.made_up_shard(
        actor.config, actor.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank()
    )
    actor.train(0, shard)  # two optimizer steps
    trained = check()
    assert any(not torch.equal(trained[name], started[name]) for name in started)

    # Masters that a cast rounds, of both signs and zeros of both signs; the weights follow as after a step.
    with torch.no_grad():
        for master in own:
            master.copy_(torch.randn_like(master) * 1e-3)
            master[::3], master[1::3] = -0.0, 0.0
    masters.rebuild()
    assert all((bits(parameter) == -(2**15)).any() for parameter in parameters.values()), "no -0.0"
    check()

    # The group is the optimizer's of now; one rank alone reads without any.
    asked, all_reduce = [], dist.all_reduce
    part.data_parallel_group = group = dist.new_group(range(ranks)) if ranks > 1 else None
    dist.all_reduce = lambda tensor, group: (asked.append(group), all_reduce(tensor, group=group))
    check()
    dist.all_reduce = all_reduce
    reads = sum(1 + len(some_rows(parameter)) for parameter in parameters.values())
    assert len(asked) == (reads if ranks > 1 else 0) and all(asked_for is group for asked_for in asked)


def some_rows(parameter):
    """A rank's experts are rows of one parameter, and any other has rows too."""
    return {0, len(parameter) // 2, len(parameter) - 1}


def check_refusals(actor):
    from miles.backends.megatron_utils.masters import MasterWeights
    from miles.backends.megatron_utils.model import build_model, build_train_state

    actor.model.chunks[0].decoder.final_layernorm.weight.requires_grad_(False)
    state = build_train_state(actor.config, actor.model.chunks, 2)
    with pytest.raises(ValueError, match="but 1 have no fp32 master .*: decoder.final_layernorm.weight; leave it out"):
        MasterWeights(state.chunks, state.optimizer, torch.clone)

    fp32_config = loss_trace.trace_config(actor.config.hf_checkpoint, 1, 1, [], Path(actor.config.run_dir))
    chunks = build_model(fp32_config, actor.model.hf_config)
    state, count = build_train_state(fp32_config, chunks, 2), len(list(chunks[0].parameters()))
    names = f"but {count} have .*: embedding.word_embeddings.weight, .* and {count - 8} more; leave it out"
    with pytest.raises(ValueError, match=names):
        MasterWeights(state.chunks, state.optimizer, torch.clone)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], Path(sys.argv[5]), json.loads(sys.argv[6]))
