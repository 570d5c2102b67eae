"""The layout changes nothing but rounding: losses, gradient norms and all metrics, on real gloo groups."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from miles.utils.network import free_ports

ROOT = Path(__file__).parents[4]
ROLLOUTS = 2  # of two optimizer steps each
# Metrics are of order 1e-3 (KL) to 10 (grad norm). Measured: at most 2e-7 apart, or 1e-6 of the value.
RELATIVE, ABSOLUTE = 5e-6, 5e-7

TP2 = ("--tensor-model-parallel-size", "2")
TP2_SP = (*TP2, "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
KL = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--entropy-coef", "0.01")
PER_TOKEN = ("--calculate-per-token-loss",)
DYNAMIC = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "64")

# What is compared, and the one process that it is compared with.
BASELINES = {"": (), "kl ": KL, "per token ": PER_TOKEN}
ALONE = {
    **{f"{kind}one process": flags for kind, flags in BASELINES.items()},
    "micro-batches of 8": ("--micro-batch-size", "8"),
    "dynamic batches": DYNAMIC,
    "plain optimizer": ("--no-use-distributed-optimizer",),
    "per token micro-batches of 3": (*PER_TOKEN, "--micro-batch-size", "3"),
}
TOGETHER = {
    "TP 2, SP": TP2_SP,
    "TP 2, SP again": TP2_SP,
    "TP 2": TP2,
    "PP 2": PP2,
    "PP 2, micro-batches of 3": (*PP2, "--micro-batch-size", "3"),
    "DP 2": (),
    "DP 2 again": (),
    "DP 2, dynamic batches": DYNAMIC,
    "DP 2, plain optimizer": ("--no-use-distributed-optimizer",),
    "kl TP 2, SP": (*KL, *TP2_SP),
    "kl PP 2": (*KL, *PP2),
    "kl DP 2": KL,
    "per token DP 2": PER_TOKEN,
    "per token DP 2, dynamic batches": (*PER_TOKEN, *DYNAMIC),
}


def baseline(name):
    kind = next((kind for kind in BASELINES if kind and name.startswith(kind)), "")
    return f"{kind}one process"


def test_layouts_agree(run_ranks, tiny_checkpoint, tmp_path):
    ports = {name: port for name, port in zip((*ALONE, "again", *TOGETHER), free_ports(30), strict=False)}
    run_ranks(__file__, 2, str(tiny_checkpoint), str(tmp_path), json.dumps(ports))
    traces = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ports}

    start = traces["one process"]
    assert len(start) == ROLLOUTS and start[-1]["train/step"] == 2 * ROLLOUTS
    assert all(math.isfinite(value) for rollout in start for value in rollout.values())
    losses = [rollout["train/loss"] for rollout in start]
    assert abs(losses[0] - losses[1]) > 1e-3  # the steps do something, else agreement would mean little
    assert traces["kl one process"][1]["train/kl_loss"] > 1e-4
    for name in ("per token one process", "kl one process"):
        assert abs(traces[name][1]["train/loss"] - losses[1]) > 1e-4

    # To the last bit: another process, and the same group a second time.
    assert traces["again"] == start
    assert traces["TP 2, SP again"] == traces["TP 2, SP"]
    assert traces["DP 2 again"] == traces["DP 2"]

    wrong = [
        f"{name}, rollout {number}: {metric} is {rollout[metric]}, not {expected[metric]}"
        for name, trace in traces.items()
        for number, (rollout, expected) in enumerate(zip(trace, traces[baseline(name)], strict=True))
        for metric in rollout.keys() | expected.keys()
        if rollout[metric] != pytest.approx(expected[metric], rel=RELATIVE, abs=ABSOLUTE)
    ]
    assert wrong == []


def loss_trace():
    """scripts/loss_trace.py as a module."""
    spec = importlib.util.spec_from_file_location("loss_trace", ROOT / "scripts" / "loss_trace.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(rank, checkpoint, folder, ports):
    from megatron.core import parallel_state

    tracing = loss_trace()

    def trace(name, rank, ranks, flags):
        scratch = folder / f"{name}, rank {rank}"
        scratch.mkdir()
        config = tracing.trace_config(checkpoint, ranks, ROLLOUTS, [*flags], scratch)
        tracing.trace(rank, ranks, config, ROLLOUTS, ports[name], folder / f"{name}.json")
        parallel_state.destroy_model_parallel()

    # First each rank for itself, then both together.
    alone = [*ALONE.items(), ("again", ())]
    for name, flags in alone[:4] if rank == 0 else alone[4:]:
        trace(name, 0, 1, flags)
    for name, flags in TOGETHER.items():
        trace(name, rank, 2, flags)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], Path(sys.argv[5]), json.loads(sys.argv[6]))
