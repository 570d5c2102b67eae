"""Process groups destroyed and rebuilt between rollouts change nothing, and nothing keeps an old one: real gloo."""

import gc
import hashlib
import json
import sys
import time
import types
import weakref
from pathlib import Path

import pytest

from miles.ray.resume import first_rollout
from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

# Cycles, with a rollout of two optimizer steps before, between and after them, and flags. In other layouts
# test_residency.py destroys and rebuilds the groups, with `verify()` after each wake.
LAYOUTS = {
    "TP 2, SP": (3, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
}
RUNS = ("straight", "cycled", "resumed")
SAVING = "TP 2, SP"  # the layout that saves and resumes


def test_training_goes_on_over_destroyed_groups(run_ranks, tiny_checkpoint, tmp_path):
    ports = free_ports(len(LAYOUTS) * len(RUNS))
    run_ranks(__file__, 2, str(tiny_checkpoint), str(tmp_path), json.dumps(ports))
    for layout, (cycles, _) in LAYOUTS.items():
        results = [json.loads((tmp_path / f"{layout}, {run}.json").read_text()) for run in runs(layout)]
        straight, cycled = results[:2]
        losses = [rollout["train/loss"] for rollout in straight]
        assert len(set(losses)) == cycles + 1  # the steps do something, else agreement would mean little
        assert cycled == straight, layout
        assert results[2:] == ([straight[2:]] if layout == SAVING else []), layout


def runs(layout):
    return RUNS if layout == SAVING else RUNS[:2]


def main(rank, checkpoint, folder, ports):
    for layout, (cycles, flags) in LAYOUTS.items():
        for run in runs(layout):
            train = {"straight": straight, "cycled": cycled, "resumed": resumed}[run]
            scratch = folder / f"{layout}, {run}, rank {rank}"
            scratch.mkdir()
            save = ("--load" if run == "resumed" else "--save", str(folder / layout))
            config = loss_trace.trace_config(checkpoint, 2, cycles + 1, [*flags, *save], scratch)
            metrics = in_world(config, rank, ports.pop(), train)
            if metrics[0]:
                (folder / f"{layout}, {run}.json").write_text(json.dumps(metrics))


def in_world(config, rank, port, train):
    """Build a trainer, have `train` yield each rollout's metrics, and tear the world down; the metrics and weights."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor

    torch.set_num_threads(1)
    actor = MegatronTrainRayActor(config, rank, 2)
    actor.init(f"127.0.0.1:{port}")
    mine = loss_trace.made_up_shard(config, actor.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank())
    result = []
    for metrics in train(actor, mine):
        digests = [None, None]
        dist.all_gather_object(digests, digest(actor.model.chunks[0]))
        kept = {name: value for name, value in metrics.items() if name.startswith("train/")}
        result.append(kept and {**kept, "weights": digests})
    leave_world()
    return result


def digest(model):
    """Of every bit of the rank's weights."""
    values = hashlib.sha256()
    for parameter in model.parameters():
        values.update(parameter.detach().numpy().tobytes())
    return values.hexdigest()


def straight(actor, shard):
    for rollout_id in range(actor.config.num_rollout):
        yield actor.train(rollout_id, shard)


def resumed(actor, shard):
    """From the checkpoint that `cycled` saved after its first cycle and second rollout."""
    assert first_rollout(actor.config) == 2
    for rollout_id in range(2, actor.config.num_rollout):
        yield actor.train(rollout_id, shard)


def cycled(actor, shard):
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from miles.backends.megatron_utils.initialize import build_process_groups
    from miles.backends.megatron_utils.patches.process_groups import SubGroups
    from miles.utils.checkpoint_folder import finish_checkpoint

    failures = []

    def build():
        build_process_groups(actor.config)
        if failures:
            raise failures.pop()

    groups = SubGroups(build, actor.agreement)
    foreign = dist.new_group(backend="gloo")
    yield actor.train(0, shard)

    known = places(actor)
    assert len(known) > 20, len(known)
    in_torch = len(_world.pg_map)
    # Holders of all kinds, that come between two cycles; the collector does not track the dict.
    name = "_TENSOR_MODEL_PARALLEL_GROUP"
    late = types.SimpleNamespace()
    for cycle in range(1, actor.config.num_rollout):
        old = destroyed(groups, foreign, cycle)
        fails(actor, shard)
        taken = [actor.model.chunks[0].tp_group] if cycle == 2 else None
        if cycle == 3:
            failing_rebuild(actor, groups, failures)
        before = time.perf_counter()
        groups.rebuild()
        print(f"cycle {cycle}: rebuilt in {time.perf_counter() - before:.3f} s")
        groups.verify()
        assert groups.alive and len(_world.pg_map) == in_torch
        current = named()
        assert current.keys() == old.keys() and all(old[key]() is None for key in old)
        assert places(actor) == known
        assert foreign in _world.pg_map and not set(current.values()) & {foreign, dist.group.WORLD}
        groups.rebuild()
        assert named() == current
        if taken:
            assert taken[0] is current[name]
        if cycle == 1:
            actor.connect([])
            late.items, late.entry, late.cell = [None, current[name]], {"group": current[name]}, closure(current[name])
            assert not gc.is_tracked(late.entry)
        else:
            assert late.items[1] is late.entry["group"] is late.cell() is current[name]
        del current
        actor.update_weights(cycle)  # gathers over the groups; there is no engine
        yield actor.train(cycle, shard)
        if cycle == 1 and SAVING in str(actor.config.save):
            actor.save(1)
            if actor.rank == 0:
                finish_checkpoint(actor.config.save, 1)
    if SAVING in str(actor.config.save):  # once is enough, it searches the process several times
        immutable_holder(actor, groups, name)


def destroyed(groups, foreign, cycle):
    """Destroy; weak references to the groups that were there, by name."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    old = {key: weakref.ref(group) for key, group in named().items()}
    before = time.perf_counter()
    groups.destroy()
    print(f"cycle {cycle}: destroyed in {time.perf_counter() - before:.3f} s, {len(groups._places)} places")
    assert not groups.alive and named() == {} and not any(reference() for reference in old.values())
    groups.verify()
    left = list(_world.pg_map)
    assert dist.group.WORLD in left and foreign in left
    groups.destroy()
    assert list(_world.pg_map) == left
    total = torch.ones(1)
    dist.all_reduce(total, group=foreign)
    assert total == 2
    return old


def fails(actor, shard):
    """What would use a group raises; the stand-in says why."""
    import torch
    import torch.distributed as dist

    with pytest.raises((RuntimeError, AssertionError)):
        actor.train(9, shard)
    with pytest.raises(RuntimeError, match="_TENSOR_MODEL_PARALLEL_GROUP was asked for size .* trainer sleeps"):
        actor.model.chunks[0].tp_group.size()
    with pytest.raises((RuntimeError, ValueError), match="_TENSOR_MODEL_PARALLEL_GROUP, destroyed"):
        dist.all_reduce(torch.ones(1), group=actor.model.chunks[0].tp_group)


def failing_rebuild(actor, groups, failures):
    """One rank fails, having made one more group than the other: both say so, and the next try succeeds."""
    import torch.distributed as dist

    if actor.rank == 0:
        failures.append(OSError("no more sockets"))
        extra = dist.new_group([0], backend="gloo")
        dist.destroy_process_group(extra)
    with pytest.raises(OSError if actor.rank == 0 else RuntimeError, match="no more sockets"):
        groups.rebuild()
    assert not groups.alive
    with pytest.raises(RuntimeError, match="neither up nor down"):
        groups.verify()
    if actor.rank == 1:  # either verb goes on from here
        groups.destroy()


def immutable_holder(actor, groups, name):
    """A group in a tuple is reported with its type until it is gone; likewise a stand-in, and what nobody shows."""
    # Only what is planted from here on is looked for: a search of all that the libraries made takes seconds.
    gc.freeze()
    planted = types.SimpleNamespace(pair=(named()[name], 1))
    gc.collect()
    assert not gc.is_tracked(planted.pair)
    holder = f"{name}, held by a tuple in .*types.SimpleNamespace"
    for verb in (groups.destroy, groups.rebuild):
        with pytest.raises(RuntimeError, match=holder):
            verb()
        assert not groups.alive
    del planted
    groups.rebuild()
    local = named()[name]
    with pytest.raises(RuntimeError, match=rf"{name}, held by what .* \(a local variable of a running function"):
        groups.destroy()
    del local
    groups.destroy()
    stand_in = (actor.model.chunks[0].tp_group,)
    groups.rebuild()
    with pytest.raises(RuntimeError, match=f"{name}, held by a tuple"):
        groups.verify()
    del stand_in
    groups.verify()


def closure(value):
    return lambda: value


def named():
    """Every group in parallel_state: {name: group}."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    every = {**vars(parallel_state), **dict(enumerate(parallel_state._global_process_group_list or []))}
    return {key: value for key, value in every.items() if isinstance(value, dist.ProcessGroup)}


def places(actor):
    """Every attribute of the trainer's objects that is a group: {(object, attribute): the group's name}."""
    import torch.distributed as dist

    ddp, optimizer = actor.model.state.chunks[0], actor.model.state.optimizer
    objects = {
        **{f"module {name}": module for name, module in ddp.named_modules()},
        **{f"buffer {number}": buffer for number, buffer in enumerate(ddp.buffers)},
        **{f"bucket group {number}": group for number, group in enumerate(ddp.bucket_groups)},
        **{f"optimizer {number}": part for number, part in enumerate([optimizer, *optimizer.chained_optimizers])},
        "parallel": actor.model.parallel,
    }
    names = {id(group): name for name, group in named().items()}
    return {
        (owner, attribute): names[id(value)]
        for owner, item in objects.items()
        for attribute, value in vars(item).items()
        if isinstance(value, dist.ProcessGroup)
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], Path(sys.argv[5]), json.loads(sys.argv[6]))
