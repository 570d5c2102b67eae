"""Training with sequences shared by two ranks against one process: every metric, log-probability and gradient."""

import json
import sys
from pathlib import Path

import pytest
import torch

from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

CP2 = ("--context-parallel-size", "2")
TP2_SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
# Metrics of all kinds, and gradients that are whole on every rank.
COMMON = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--entropy-coef", "0.01")
WHOLE = (*COMMON, "--no-use-distributed-optimizer")
CASES = {
    2: {
        "CP 2": (*WHOLE, *CP2),
        "CP 2, dynamic batches": (*WHOLE, *CP2, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"),
        "CP 2, micro-batches of 3": (*COMMON, *CP2, "--micro-batch-size", "3"),
    },
    4: {
        "CP 4": (*WHOLE, "--context-parallel-size", "4"),
        "CP 2, TP 2, SP": (*COMMON, *CP2, *TP2_SP),
        "CP 2, PP 2": (*COMMON, *CP2, *PP2),
        "CP 2, DP 2": (*COMMON, *CP2),
    },
}


def trained(rank, ranks, checkpoint, folder, flags, port):
    """Metrics of a rollout of two optimizer steps, log-probabilities before it, and the last step's gradients."""
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor

    config = loss_trace.trace_config(checkpoint, ranks, 1, list(flags), folder)
    actor = MegatronTrainRayActor(config, rank, ranks)
    actor.init(f"127.0.0.1:{port}")
    shard = loss_trace.made_up_shard(config, actor.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank())
    log_probs = actor.trainer.log_probs(shard)
    metrics = actor.train(0, shard)
    found = {
        "metrics": {name: value for name, value in metrics.items() if name.startswith("train/")},
        # By sample, since data-parallel ranks have different ones, in another order with dynamic batches.
        "log_probs": log_probs
        if log_probs is None
        else {
            int(index): log_probs[slice(*shard.batch.response_offsets[row : row + 2])]
            for row, index in enumerate(shard.batch["sample_indices"])
        },
        "gradients": {name: p.main_grad.clone() for c in actor.model.chunks for name, p in c.named_parameters()},
    }
    leave_world()
    return found


def compare(name, got, want, with_gradients):
    if got["log_probs"] is not None:  # the last pipeline stage
        for sample, log_probs in got["log_probs"].items():
            torch.testing.assert_close(log_probs, want["log_probs"][sample], rtol=0, atol=5e-6)
    wrong = [
        f"{metric} is {value}, not {want['metrics'][metric]}"
        for metric, value in got["metrics"].items()
        if value != pytest.approx(want["metrics"][metric], rel=5e-6, abs=5e-7)
    ]
    assert wrong == [], f"{name}: {wrong}"
    assert not got["metrics"] or got["metrics"].keys() == want["metrics"].keys()
    if with_gradients:
        errors = {
            key: ((got["gradients"][key] - grad).abs().max() / grad.abs().max()).item()
            for key, grad in want["gradients"].items()
        }
        print(f"{name}: gradients differ by {max(errors.values()):.1e}")
        assert max(errors.values()) < 1e-4, f"{name}: {errors}"


def main(rank, ranks, checkpoint, folder, ports):
    torch.set_num_threads(1)
    if rank == 0:
        one = trained(0, 1, checkpoint, folder, WHOLE, ports[0])
        assert one["metrics"]["train/kl_loss"] > 1e-5 and one["metrics"]["train/entropy_loss"] > 1
        torch.save(one, folder / "one.pt")
    for number, (name, flags) in enumerate(CASES[ranks].items()):
        got = trained(rank, ranks, checkpoint, folder, flags, ports[1 + number])
        assert bool(got["metrics"]) == (rank == (2 if "PP" in name else 0)), f"{name}: one rank reports"
        compare(name, got, torch.load(folder / "one.pt"), WHOLE[-1] in flags)


def test_two_ranks(run_ranks, tiny_checkpoint, tmp_path):
    run_ranks(__file__, 2, str(tiny_checkpoint), str(tmp_path), json.dumps(free_ports(4)))


@pytest.mark.slow
def test_four_ranks(run_ranks, tiny_checkpoint, tmp_path):
    run_ranks(__file__, 4, str(tiny_checkpoint), str(tmp_path), json.dumps(free_ports(5)), timeout=200)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4], Path(sys.argv[5]), json.loads(sys.argv[6]))
