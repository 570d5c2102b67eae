"""A trainer that sleeps between its steps learns exactly what one that never sleeps does; on real gloo ranks."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch

from miles.residency.plan import Move, Place, Region, leaves_after_sync
from miles.residency.state import ResidencyError
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

ROLLOUTS = 2  # of two optimizer steps each
DISK = ("--offload-train-target", "disk")
# A step of eight samples has two micro-batches: half of the time, and their number is not what is tested.
FEW = ("--micro-batch-size", "4")
# Flags of the layout, and of the sleep.
CASES = {
    "DP 2": ((), ()),
    "TP 2, SP": (
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        ("--no-offload-train-keep-host-buffers",),
    ),
    "PP 2, bf16, disk": (("--pipeline-model-parallel-size", "2", "--bf16"), DISK),
    "DP 2, bf16, rematerialised": (("--bf16",), ("--rematerialize-param-from-master-weight",)),
    "DP 2, bf16, streamed": (("--bf16",), ("--stream-optimizer-state-to-disk",)),
    "DP 2, plain optimizer": (("--no-use-distributed-optimizer",), ()),
}


def test_sleeping_changes_no_bit(run_ranks, tiny_checkpoint, tmp_path):
    """Nor keeps memory, and the verbs do what they say: each rank alone checks one of these (`memory`, `verbs`)."""
    make_tiny_checkpoint(tmp_path / "model", hidden_size=512, intermediate_size=1536, vocab_size=8192)
    checkpoints = json.dumps([str(tmp_path / "model"), str(tiny_checkpoint)])
    run_ranks(__file__, 2, checkpoints, str(tmp_path), json.dumps(free_ports(2 + 2 * len(CASES))))
    for name in CASES:
        awake, asleep = (json.loads((tmp_path / f"{name}, {kind}.json").read_text()) for kind in ("awake", "asleep"))
        assert len(awake) == ROLLOUTS and awake[0]["train/grad_norm"] > 0
        assert awake[0]["train/loss"] != awake[1]["train/loss"], "the steps must do something"
        assert asleep == awake, name


def test_quantised_workspaces_are_dropped():
    from miles.backends.megatron_utils.regions import drop_quantized_workspaces

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0]._fp8_workspaces = {"weight": torch.zeros(4)}  # as Transformer Engine's modules have it
    assert drop_quantized_workspaces([model]) == 1
    assert model[0]._fp8_workspaces == {}
    assert drop_quantized_workspaces([model]) == 0


# --- what the ranks run ---


def main(rank, checkpoints, folder, ports):
    torch.set_num_threads(1)
    # First each rank in a world of its own; the memory is that of a process which has done nothing else yet.
    (memory, verbs)[rank](checkpoints[rank], folder / f"alone, rank {rank}", ports[rank])
    leave_world()
    # The collections and searches of every cycle need not go through all that the libraries made a hundred times.
    gc.freeze()
    worlds = [(name, kind) for name in CASES for kind in ("awake", "asleep")]
    for (name, kind), port in zip(worlds, ports[2:], strict=True):
        lines = bits(rank, checkpoints[1], folder / f"{name}, {kind}, rank {rank}", port, name, kind == "asleep")
        if lines[0]:
            (folder / f"{name}, {kind}.json").write_text(json.dumps(lines))
        leave_world()


def build(rank, ranks, checkpoint, folder, port, flags, sleeping):
    """An actor, built and loaded, and its shard of the made-up rollout. sleeping: flags of how it sleeps, or None."""
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor

    folder.mkdir()
    if sleeping is not None and any("disk" in flag for flag in sleeping):
        sleeping = (*sleeping, "--offload-train-disk-dir", str(folder), "--offload-train-disk-chunk-mb", "1")
    flags = [*FEW, *flags, *(sleeping or ())]
    config = loss_trace.trace_config(checkpoint, ranks, ROLLOUTS, flags, folder, sleep=sleeping is not None)
    actor = MegatronTrainRayActor(config, rank, ranks)
    actor.init(f"127.0.0.1:{port}")
    shard = loss_trace.made_up_shard(config, actor.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank())
    return actor, shard


def storages(actor):
    """Bytes of memory behind everything that must leave."""
    from miles.backends.megatron_utils.torch_adam import inner_optimizers

    tensors = [
        *actor.model.chunks[0].parameters(),
        *(buffer.grad_data for buffer in actor.model.state.chunks[0].buffers),
    ]
    if actor.config.stream_optimizer_state_to_disk:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    for optimizer in inner_optimizers(actor.model.state.optimizer):
        for group in optimizer.param_groups:
            for master in group["params"]:
                tensors += [master, optimizer.state[master]["exp_avg"], optimizer.state[master]["exp_avg_sq"]]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def bits(rank, checkpoint, folder, port, case, asleep):
    """What each rollout reports of the training."""
    from megatron.core import parallel_state

    flags, sleeping = CASES[case]
    actor, shard = build(rank, 2, checkpoint, folder, port, flags, sleeping if asleep else None)
    groups = Move(actor.party, Region.COMM, Place.GPU, Place.DROPPED)
    lines, group = [], id(parallel_state.get_tensor_model_parallel_group())
    for rollout_id in range(ROLLOUTS):
        if asleep:
            metrics = actor.sleep()
            actor.move(leaves_after_sync(actor.party, actor.residency.policy))
            assert storages(actor) == 0 and actor.residency.asleep and not actor.residency.groups.alive
            assert metrics["perf/sleep_bytes"] > 0 and actor.sleep() == {}
            assert actor.residency._fingerprints, "--check-residency hashes however the trainer sleeps"
            if rollout_id:
                # A weight sync while it sleeps on may need them once more.
                assert actor.move([groups.reversed()])["perf/reload_process_groups_time"] > 0
                assert actor.residency.groups.alive and actor.residency.asleep and storages(actor) == 0
                assert actor.move([groups])["perf/destroy_process_groups_time"] > 0
                assert actor.move([groups]) == {}
                assert not actor.residency.groups.alive
                # In the first rollout train() wakes it.
                assert actor.wake_up()["perf/wake_up_bytes"] == metrics["perf/sleep_bytes"]
                assert actor.wake_up() == {}
                assert storages(actor) > 0
        metrics = actor.train(rollout_id, shard)
        lines.append({name: value for name, value in metrics.items() if name.startswith("train/")})
    if asleep:
        assert id(parallel_state.get_tensor_model_parallel_group()) != group
        fail_alone(rank, actor, waits=not any("parallel-size" in flag for flag in flags))
    return lines


def fail_alone(rank, actor, waits):
    """What fails on one rank is told to the other, if that would wait for it later on; the next call finishes."""
    store = actor.residency.store
    actor.sleep()
    if rank == 1:
        streamed = actor.config.stream_optimizer_state_to_disk
        store.load = failing(store.load, "weights" if streamed else "optimizer")
        with pytest.raises(OSError, match="injected"):
            actor.wake_up()
        del store.load
    elif waits:
        with pytest.raises(RuntimeError, match="moving a trainer rank's memory: trainer rank 1: OSError: injected"):
            actor.wake_up()
    else:
        actor.wake_up()
    assert actor.residency.asleep == (rank == 1 or waits)
    actor.wake_up()
    assert not actor.residency.asleep and actor.residency.groups.alive


def failing(method, region):
    """A store's method that fails for a region."""

    def fail(key, *arguments):
        if key.startswith(region):
            raise OSError("injected")
        return method(key, *arguments)

    return fail


def memory(checkpoint, folder, port):
    """With the disk as its target a sleeping trainer keeps next to nothing of its 16 bytes a parameter."""
    from miles.utils.host_memory import resident_bytes

    actor, shard = build(0, 1, checkpoint, folder, port, (), DISK)
    actor.residency._check = False  # its temporaries would blur the figures
    actor.train(0, shard)
    parameters = sum(parameter.numel() for parameter in actor.model.chunks[0].parameters())
    whole = 16 * parameters  # float32 weights, gradients and two moments
    for cycle in range(3):
        before = resident_bytes()
        actor.sleep()
        asleep = resident_bytes()
        actor.wake_up()
        if cycle:  # the first has made the staging buffer
            assert before - asleep > 0.9 * whole, (before, asleep, whole)
            assert resident_bytes() < before + 0.05 * whole
    assert [file.name for file in folder.iterdir() if file.is_file() and file.name != "prompts.jsonl"] == []


def verbs(checkpoint, folder, port):
    """Idempotence, saving in the sleep, failures midway, the hash check."""
    actor, shard = build(0, 1, checkpoint, folder, port, ("--save", str(folder / "saved")), ())
    actor.train(0, shard)
    residency, expected = actor.residency, actor.train(1, shard)["train/loss"]

    actor.save(0)
    actor.offload_grad_buffer()
    assert actor.offload_grad_buffer() == {}
    metrics = actor.sleep()
    assert metrics["perf/cpu_memory_after_offload_train_gb"] > 0
    actor.save(1)
    assert residency.asleep, "saving leaves a sleeping trainer asleep"
    first, second = ((folder / "saved").glob(f"*{number}/model/*.distcp") for number in (0, 1))
    assert [file.read_bytes() for file in sorted(first)] == [file.read_bytes() for file in sorted(second)]

    assert not residency.groups.alive
    weight = next(actor.model.chunks[0].parameters())
    copy = residency.read_weight(weight).clone()
    with pytest.raises(ResidencyError, match="^actor weights is host: it can't move from gpu to disk$"):
        actor.move([Move(actor.party, Region.WEIGHTS, Place.GPU, Place.DISK)])
    actor.wake_up()
    assert torch.equal(copy, weight)

    # A copy that fails leaves all contents where they are; the next call finishes.
    for verb, method in (("sleep", "save"), ("wake_up", "load")):
        setattr(residency.store, method, failing(getattr(residency.store, method), "optimizer"))
        with pytest.raises(OSError, match="injected"):
            getattr(actor, verb)()
        delattr(residency.store, method)
        getattr(actor, verb)()
        assert residency.asleep == (verb == "sleep")

    # The hash check notices one flipped bit.
    actor.sleep()
    residency.store.read("weights.0", 0, 1)[0] ^= 1
    with pytest.raises(RuntimeError, match="--check-residency: 2 of .* decoder.final_layernorm.weight"):
        actor.wake_up()
    assert actor.train(2, shard)["train/loss"] != expected

    actor.residency = None
    with pytest.raises(ValueError, match="--offload-train"):
        actor.sleep()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[4]), Path(sys.argv[5]), json.loads(sys.argv[6]))
