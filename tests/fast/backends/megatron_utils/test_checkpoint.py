"""A loaded trainer continues as the one that saved: to the last bit in the same layout, to rounding in another."""

import gzip
import hashlib
import json
import math
import sys
from pathlib import Path

import pytest

from miles.ray.resume import first_rollout
from miles.utils.checkpoint_folder import MARKER, finish_checkpoint
from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

TP2 = ("--tensor-model-parallel-size", "2")
# A step of eight samples has two micro-batches: half of the time, and their number is not what is tested.
FEW = ("--micro-batch-size", "4")
PP2 = ("--pipeline-model-parallel-size", "2")
# A schedule that moves, so that its position matters.
SCHEDULE = ("--lr-warmup-iters", "3", "--lr-decay-style", "linear")
PLAIN = ("--no-use-distributed-optimizer",)
SAVED_AFTER, ROLLOUTS = 0, 3  # of two optimizer steps each
LONGER = 5  # rollouts of a run that is resumed with OTHER flags
OTHER = ("--lr", "0.002", "--min-lr", "0.0002", "--weight-decay", "0.3", "--adam-beta2", "0.9", "--adam-eps", "1e-6")
OTHER = (*OTHER, "--lr-decay-style", "cosine", "--lr-warmup-iters", "1")
UNNAMED = 8  # the number of a checkpoint that is like SAVED_AFTER's but does not keep the settings by name
UNTRAINED = 7  # the number of a checkpoint that is saved before the first step

# Of the first rollout of those that follow.
PROFILED = ("--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "2")
PROFILED = (*PROFILED, "--profile-target", "train_actor", "train_log_probs")

# name -> (ranks, flags); each is trained to the end and saves after rollouts 0 and 1.
STRAIGHT = {
    "alone": (1, ()),
    "alone, no optimizer saved": (1, ("--no-save-optim",)),
    "alone, plain optimizer": (1, PLAIN),
    "DP 2": (2, ()),
    "TP 2": (2, TP2),
}
# name -> (the run whose checkpoints it loads, ranks, flags); in new processes, trained to the end.
RESUMED = {
    "alone": ("alone", 1, ()),
    "alone, plain optimizer": ("alone, plain optimizer", 1, PLAIN),
    "untrained": ("alone, plain optimizer", 1, (*PLAIN, "--ckpt-step", str(UNTRAINED), "--start-rollout-id", "0")),
    "chosen step": ("alone", 1, ("--ckpt-step", "1")),
    "other flags": ("alone", 1, OTHER),
    "other flags, plain optimizer": ("alone, plain optimizer", 1, (*PLAIN, *OTHER)),
    "other flags, unnamed before": (
        "alone, plain optimizer",
        1,
        (*PLAIN, *OTHER, "--ckpt-step", str(UNNAMED), "--start-rollout-id", "1"),
    ),
    "distributed to plain": ("alone", 1, PLAIN),
    "plain fp32 to bf16": ("alone, plain optimizer", 1, (*PLAIN, "--bf16")),
    "no optimizer wanted": ("alone", 1, ("--no-load-optim",)),
    "deterministic": ("alone", 1, ("--deterministic-mode", *PROFILED)),
    "new run": ("alone", 1, ("--finetune",)),
    "no optimizer saved": ("alone, no optimizer saved", 1, ()),
    "no optimizer saved or wanted": ("alone, no optimizer saved", 1, ("--no-load-optim",)),
    "no marker": ("no marker", 1, ()),
    "TP 2 to alone": ("TP 2", 1, ()),
    "DP 2 to alone": ("DP 2", 1, ()),
    "DP 2": ("DP 2", 2, ()),
    "TP 2": ("TP 2", 2, TP2),
    "TP 2 to PP 2": ("TP 2", 2, PP2),
    "alone to DP 2": ("alone", 2, ()),
}


@pytest.fixture
def results(run_ranks, tiny_checkpoint, tmp_path):
    """What each run wrote: {"start", "weights": [digest at the start and after each rollout], "metrics", "error"}."""
    for phase, runs in (("straight", STRAIGHT), ("resumed", RESUMED)):
        (tmp_path / phase).mkdir()
        ports = dict(zip(runs, free_ports(len(runs)), strict=True))
        run_ranks(__file__, 2, phase, str(tiny_checkpoint), str(tmp_path), json.dumps(ports))
        if phase == "straight":
            spoil(tmp_path)

    def read(phase, name):
        return json.loads((tmp_path / phase / f"{name}.json").read_text())

    return read


def spoil(folder):
    """Set the marker back to the first checkpoint, and lay down what a killed run may leave behind."""
    for name in STRAIGHT:
        assert (folder / name / "iter_0000001").is_dir()
        (folder / name / MARKER).write_text(f"{SAVED_AFTER}\n")
        (folder / name / "iter_0000009" / "model").mkdir(parents=True)
    (folder / "no marker" / "iter_0000000" / "model").mkdir(parents=True)


def test_save_and_load(results, tmp_path):
    straight = results("straight", "alone")
    assert len(set(straight["weights"])) == ROLLOUTS + 1
    # Saving and leaving out the optimizer change nothing.
    assert results("straight", "alone, no optimizer saved") == straight

    # The same layout: to the last bit, weights and metrics.
    for name in ("alone", "alone, plain optimizer", "DP 2", "TP 2", "deterministic"):
        resumed, original = results("resumed", name), results("straight", RESUMED[name][0])
        assert resumed["start"] == 1
        assert resumed["weights"] == original["weights"][1:], name
        assert resumed["metrics"] == original["metrics"][1:], name
    traces = [gzip.open(path, "rt").read() for path in tmp_path.glob("resumed/deterministic, rank*/profile/*_1_rank0*")]
    assert len(traces) == 2 and all('"aten::mm"' in trace for trace in traces)
    assert len(list(tmp_path.glob("resumed/deterministic, rank*/profile/*"))) == 2
    chosen = results("resumed", "chosen step")
    assert (chosen["start"], chosen["weights"]) == (2, straight["weights"][2:])
    assert chosen["metrics"] == straight["metrics"][2:]

    # Other flags hold from the first step to the last. Two steps were taken before, and the decay ends with the run.
    rates = [0.0002 + 0.0018 * (1 + math.cos(math.pi * (step - 1) / (2 * LONGER - 1))) / 2 for step in range(2, 6)]
    for name in ("other flags", "other flags, plain optimizer", "other flags, unnamed before"):
        resumed = results("resumed", name)
        found = [metrics["train/lr-pg_0"] for metrics in resumed["metrics"]]
        assert found == pytest.approx([sum(rates[:2]) / 2, sum(rates[2:]) / 2]), name
        assert resumed["groups"] == [[0.3, [0.9, 0.9], 1e-6]] * 2, name

    # Saved before the first step, when a plain optimizer has no moments yet: all of the run.
    assert {**results("resumed", "untrained"), "random": None} == results("straight", "alone, plain optimizer")

    # Another layout: to rounding.
    for name in ("TP 2 to alone", "DP 2 to alone", "TP 2 to PP 2", "alone to DP 2"):
        resumed = results("resumed", name)
        assert resumed["start"] == 1
        for found, expected in zip(resumed["metrics"], straight["metrics"][1:], strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), name

    # Weights only: those of the checkpoint, with a schedule and an optimizer that start anew.
    for name in ("no optimizer wanted", "no optimizer saved or wanted"):
        fresh = results("resumed", name)
        assert (fresh["start"], fresh["weights"][0]) == (1, straight["weights"][1])
        assert fresh["metrics"][0]["train/step"] == 2 and fresh["weights"][1] != straight["weights"][2]
    fresh = results("resumed", "new run")
    assert (fresh["start"], fresh["weights"][0]) == (0, straight["weights"][1])
    assert [metrics["train/step"] for metrics in fresh["metrics"]] == [2, 4, 6]
    # Random numbers go on where they were, or, as --finetune derives --no-load-rng, start anew.
    assert results("resumed", "alone")["random"] == results("resumed", "no optimizer wanted")["random"] == "later"
    assert fresh["random"] == "first"
    refused = results("resumed", "no optimizer saved")
    assert "iter_0000000 holds no optimizer state" in refused["error"] and "--no-load-optim" in refused["error"]

    error = results("resumed", "distributed to plain")["error"]
    assert (
        "with --use-distributed-optimizer and this run has --no-use-distributed-optimizer and --no-bf16: opt" in error
    )
    error = results("resumed", "plain fp32 to bf16")["error"]
    assert "with --no-use-distributed-optimizer and --no-bf16 and this run has --no-use-distributed-opt" in error

    # No marker: a new run from the Hugging Face weights, whatever lies there.
    assert results("resumed", "no marker") == {**straight, "start": 0}


def test_the_failure_of_a_rank_is_raised_as_it_is():
    """torch's own error is no Exception, so that nothing that handles failures would see it."""
    from torch.distributed.checkpoint import CheckpointException

    from miles.backends.megatron_utils.checkpoint import causes

    failure = OSError(28, "No space left on device", "/a/__1_0.distcp")
    with pytest.raises(OSError, match="/a/__1_0.distcp") as caught, causes():
        raise CheckpointException("save", {1: (failure, None)})
    assert caught.value is failure


def main(rank, phase, checkpoint, folder, ports):
    if phase == "straight":
        runs = {
            name: (name, ranks, (*flags, "--save", str(folder / name))) for name, (ranks, flags) in STRAIGHT.items()
        }
    else:
        runs = {
            name: (name, ranks, (*flags, "--load", str(folder / source)))
            for name, (source, ranks, flags) in RESUMED.items()
        }
    alone = [run for run in runs.values() if run[1] == 1]
    together = [run for run in runs.values() if run[1] == 2]
    # First each rank for itself, then both together.
    for name, ranks, flags in alone[rank::2] + together:
        scratch = folder / phase / f"{name}, rank {rank}"
        scratch.mkdir()
        length, flags = (LONGER, flags) if "--lr" in flags else (ROLLOUTS, (*SCHEDULE, *flags))
        config = loss_trace.trace_config(checkpoint, ranks, length, [*FEW, *flags], scratch)
        result = run(config, rank if ranks == 2 else 0, ranks, ports[name])
        if result["error"] or result["metrics"][-1]:
            (folder / phase / f"{name}.json").write_text(json.dumps(result))


def run(config, rank, ranks, port):
    import torch
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor
    from miles.utils.errors import UserError

    torch.set_num_threads(1)
    actor = MegatronTrainRayActor(config, rank, ranks)
    result = {"start": None, "weights": [], "metrics": [], "groups": [], "random": None, "error": None}
    try:
        actor.init(f"127.0.0.1:{port}")
    except UserError as error:
        result["error"] = str(error)
    else:
        assert torch.are_deterministic_algorithms_enabled() == config.deterministic_mode
        mine = loss_trace.made_up_shard(
            config, actor.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank()
        )
        state, first = torch.get_rng_state(), torch.Generator().manual_seed(actor.config.seed).get_state()
        if actor.config.load is not None:
            result["random"] = "first" if torch.equal(state, first) else "later"
        torch.rand(1)  # so that a checkpoint has another state than a start
        result["start"] = first_rollout(actor.config)
        result["weights"].append(digest(actor.model.chunks))
        if config.save is not None and not config.use_distributed_optimizer:
            actor.save(UNTRAINED)
            if rank == 0:
                finish_checkpoint(config.save, UNTRAINED)
        for rollout_id in range(result["start"], ROLLOUTS):
            metrics = actor.train(rollout_id, mine)
            # Biases and norms have no weight decay.
            group = max(actor.model.state.optimizer.param_groups, key=lambda group: group["weight_decay"])
            result["groups"].append([group["weight_decay"], group["betas"], group["eps"]])
            result["metrics"].append({name: value for name, value in metrics.items() if name.startswith("train/")})
            result["weights"].append(digest(actor.model.chunks))
            if config.save is not None and rollout_id < 2:
                actor.save(rollout_id)
                if rank == 0:
                    finish_checkpoint(config.save, rollout_id)
            if config.save is not None and not config.use_distributed_optimizer and rollout_id == SAVED_AFTER:
                save_without_names(actor)
                if rank == 0:
                    finish_checkpoint(config.save, UNNAMED)
    torch.use_deterministic_algorithms(False)
    leave_world()
    return result


def save_without_names(actor):
    from miles.backends.megatron_utils import checkpoint

    original = checkpoint._sharded_state

    def without_names(*arguments, **keywords):
        state = original(*arguments, **keywords)
        assert state.pop("settings")["lr"] == 0.001
        return state

    checkpoint._sharded_state = without_names
    actor.save(UNNAMED)
    checkpoint._sharded_state = original


def digest(chunks):
    """Of every bit of the rank's weights."""
    values = hashlib.sha256()
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        values.update(parameter.detach().numpy().tobytes())
    return values.hexdigest()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], sys.argv[5], Path(sys.argv[6]), json.loads(sys.argv[7]))
