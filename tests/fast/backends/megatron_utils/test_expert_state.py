"""A trainer of experts, and one of interleaved stages, sleeps and resumes without a changed bit; real gloo ranks."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles.ray.resume import first_rollout
from miles.residency.plan import leaves_after_sync
from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.backends.megatron_utils.test_expert_layouts import (
    EP2,
    INTERLEAVED,
    PP2,
    TP2_SP,
    checkpoint,
)
from tests.fast.ranks import leave_world

__all__ = ["checkpoint"]

ROLLOUTS = 3  # of two optimizer steps each
DISK = ("--offload-train-target", "disk")
REBUILT = ("--rematerialize-param-from-master-weight",)
# Flags of the layout, and of the sleep.
SLEEPS = {
    "EP 2": (EP2, ()),
    "EP 2, bf16, rebuilt": ((*EP2, "--bf16"), REBUILT),
    "TP 2, EP 2, plain optimizer, disk": ((*TP2_SP, *EP2, "--no-use-distributed-optimizer"), DISK),
    "PP 2, interleaved, bf16, rebuilt": ((*INTERLEAVED, "--bf16"), REBUILT),
    "PP 2, interleaved, bf16, streamed": ((*INTERLEAVED, "--bf16"), ("--stream-optimizer-state-to-disk",)),
}
# Layout to save in, and layouts to resume in: the first is the same.
SAVES = {
    "EP 2": (EP2, {"EP 2": EP2, "TP 2, EP 2": (*TP2_SP, *EP2), "DP 2": ()}),
    "PP 2, interleaved": (INTERLEAVED, {"PP 2, interleaved": INTERLEAVED, "PP 2": PP2, "TP 2": TP2_SP, "EP 2": EP2}),
}


@pytest.mark.slow
def test_sleeping_changes_no_bit(run_ranks, checkpoint, tmp_path):
    run_ranks(__file__, 2, "sleep", str(checkpoint), str(tmp_path), json.dumps(free_ports(2 * len(SLEEPS))))
    for name in SLEEPS:
        awake, asleep = (json.loads((tmp_path / f"{name}, {kind}.json").read_text()) for kind in ("awake", "asleep"))
        assert awake["metrics"][0]["train/loss"] != awake["metrics"][1]["train/loss"], "the steps must do something"
        assert asleep == awake, name


@pytest.mark.slow
def test_resuming(run_ranks, checkpoint, tmp_path):
    ports = free_ports(sum(1 + len(resumed) for _, resumed in SAVES.values()))
    run_ranks(__file__, 2, "save", str(checkpoint), str(tmp_path), json.dumps(ports))
    for name, (_, resumed) in SAVES.items():
        straight = json.loads((tmp_path / f"{name}.json").read_text())
        for layout in resumed:
            found = json.loads((tmp_path / f"{name} to {layout}.json").read_text())
            if ("EP" in name) != ("EP" in layout):
                assert "--expert-model-parallel-size" in found["error"] and "--no-load-optim" in found["error"]
                continue
            if layout == name:
                assert found["weights"] == straight["weights"][1:], name
                assert found["metrics"] == straight["metrics"][1:], name
            for metrics, expected in zip(found["metrics"], straight["metrics"][1:], strict=True):
                assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6), (name, layout)


def test_state_of_several_buckets_is_put_where_the_index_of_its_buffer_says():
    import torch

    from miles.backends.megatron_utils.patches.bucket_places import at_places_in_buffers

    buckets = [SimpleNamespace(offset=0, numel_unpadded=3), SimpleNamespace(offset=8, numel_unpadded=2)]
    optimizer = SimpleNamespace(buffers=[SimpleNamespace(buckets=buckets, numel=12)])
    state = {0: {"fp32": {"exp_avg": torch.arange(1.0, 6.0), "numel_unpadded": 5}}}
    (found,) = at_places_in_buffers(optimizer, state)[0].values()
    assert found["exp_avg"].tolist() == [1, 2, 3, 0, 0, 0, 0, 0, 4, 5, 0, 0]
    assert found["numel_unpadded"] == 5 and at_places_in_buffers(optimizer, None) is None


# --- what the ranks run ---


def main(rank, phase, checkpoint, folder, ports):
    runs = []
    if phase == "sleep":
        for name, (flags, sleeping) in SLEEPS.items():
            runs.append((f"{name}, awake", flags, None))
            runs.append((f"{name}, asleep", flags, sleeping))
    else:
        for name, (flags, resumed) in SAVES.items():
            runs.append((name, (*flags, "--save", str(folder / f"{name} saved")), None))
            for layout, others in resumed.items():
                runs.append((f"{name} to {layout}", (*others, "--load", str(folder / f"{name} saved")), None))
    for (name, flags, sleeping), port in zip(runs, ports, strict=True):
        scratch = folder / f"{name}, rank {rank}"
        scratch.mkdir()
        if sleeping and any("disk" in flag for flag in sleeping):
            sleeping = (*sleeping, "--offload-train-disk-dir", str(scratch), "--offload-train-disk-chunk-mb", "1")
        flags = [*flags, *(sleeping or ())]
        config = loss_trace.trace_config(checkpoint, 2, ROLLOUTS, flags, scratch, sleep=sleeping is not None)
        result = run(config, rank, port)
        if result["error"] or result["metrics"][0]:
            (folder / f"{name}.json").write_text(json.dumps(result))


def run(config, rank, port):
    import torch

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor
    from miles.utils.errors import UserError

    torch.set_num_threads(1)
    actor = MegatronTrainRayActor(config, rank, 2)
    result = {"weights": [], "metrics": [], "error": None}
    try:
        actor.init(f"127.0.0.1:{port}")
    except UserError as error:
        result["error"] = str(error)
    else:
        train(actor, result)
    leave_world()
    return result


def train(actor, result):
    from megatron.core import parallel_state

    from miles.utils.checkpoint_folder import finish_checkpoint

    config = actor.config
    mine = loss_trace.made_up_shard(config, actor.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank())
    result["weights"].append(digest(actor.model.chunks))
    for rollout_id in range(first_rollout(actor.config), ROLLOUTS):
        if config.offload_train:
            actor.sleep()
            actor.move(leaves_after_sync(actor.party, actor.residency.policy))
            assert all(parameter.untyped_storage().nbytes() == 0 for parameter in actor.model.chunks[0].parameters())
        metrics = actor.train(rollout_id, mine)
        result["metrics"].append({name: value for name, value in metrics.items() if name.startswith("train/")})
        result["weights"].append(digest(actor.model.chunks))
        if config.save is not None and rollout_id == 0:
            actor.save(0)
            if actor.rank == 0:
                finish_checkpoint(config.save, 0)


def digest(chunks):
    """Of every bit of all ranks' weights."""
    import torch

    values = hashlib.sha256()
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        # A copy: storage that numpy has seen cannot be given back.
        values.update(parameter.detach().clone().view(torch.uint8).numpy().tobytes())
    digests = [None, None]
    torch.distributed.all_gather_object(digests, values.hexdigest())
    return digests


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], sys.argv[5], Path(sys.argv[6]), json.loads(sys.argv[7]))
