"""The layout changes nothing but rounding: losses, gradient norms and all metrics, on real gloo groups."""

import json
import math
import sys
from pathlib import Path

import pytest

from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

ROLLOUTS = 2  # of two optimizer steps each
# Metrics are of order 1e-3 (KL) to 10 (grad norm). Measured: at most 2e-7 apart, or 2e-6 of the value.
RELATIVE, ABSOLUTE = 5e-6, 5e-7

TP2 = ("--tensor-model-parallel-size", "2")
TP2_SP = (*TP2, "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
KL = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--entropy-coef", "0.01")
PER_TOKEN = ("--calculate-per-token-loss",)
DYNAMIC = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "64")
# Adam makes whole steps of gradients that are zero but for rounding; not so with a larger epsilon.
SMOOTH = ("--adam-eps", "1e-5")
# Micro-batches of a step of eight samples. A baseline has eight; a layout that says nothing of them has four.
ONE, TWO, FOUR, EIGHT = (("--micro-batch-size", size) for size in ("8", "4", "2", "1"))
OF_ITS_OWN = {"--micro-batch-size", "--use-dynamic-batch-size"}

# What is compared, and the one process that it is compared with. Most need sums over whole samples.
BASELINES = {
    "": (),
    "kl ": KL,
    "per token ": PER_TOKEN,
    "gspo ": ("--advantage-estimator", "gspo", "--eps-clip", "0.01"),
    "corrections ": (
        *("--use-tis", "--tis-level", "sequence", "--use-opsm", "--use-rs", "--rs-level", "geometric"),
        *("--rs-lower-bound", "0.4", "--rs-upper-bound", "2.5", "--rs-veto-threshold", "0.15"),
    ),
    "cispo ": ("--advantage-estimator", "cispo"),
    "reinforce ": (
        *("--advantage-estimator", "reinforce_plus_plus", "--kl-coef", "0.1", "--kl-loss-type", "k3"),
        *("--gamma", "0.9"),
    ),
    "ppo ": ("--advantage-estimator", "ppo", "--lambd", "0.9", "--gamma", "0.95", "--normalize-advantages"),
}

# name -> (ranks, flags beside those of its baseline)
QUICK = {
    "again": (1, EIGHT),
    "micro-batches of 8": (1, ONE),
    "dynamic batches": (1, DYNAMIC),
    "plain optimizer": (1, ("--no-use-distributed-optimizer",)),
    "per token micro-batches of 3": (1, ("--micro-batch-size", "3")),
    "gspo one micro-batch": (1, ONE),
    "corrections two micro-batches": (1, TWO),
    "reinforce four micro-batches": (1, FOUR),
    "TP 2, SP": (2, TP2_SP),
    "TP 2, SP again": (2, TP2_SP),
    "TP 2": (2, TP2),
    "PP 2": (2, PP2),
    "PP 2, micro-batches of 3": (2, (*PP2, "--micro-batch-size", "3")),
    "DP 2": (2, ()),
    "DP 2 again": (2, ()),
    "DP 2, dynamic batches": (2, DYNAMIC),
    "DP 2, plain optimizer": (2, ("--no-use-distributed-optimizer",)),
    "kl TP 2, SP": (2, TP2_SP),
    "kl PP 2": (2, PP2),
    "kl DP 2": (2, ()),
    "per token DP 2": (2, ()),
    "per token DP 2, dynamic batches": (2, DYNAMIC),
    "gspo CP 2": (2, (*CP2, *TWO)),
    "corrections CP 2": (2, CP2),
    "corrections PP 2": (2, (*PP2, *TWO)),
    "reinforce DP 2": (2, ()),
    "reinforce CP 2": (2, CP2),
    "ppo DP 2": (2, ()),
    "ppo CP 2": (2, CP2),
}
SLOW = {
    f"{kind}{name}": layout
    for kind in list(BASELINES)[3:]
    for name, layout in {
        "one micro-batch": (1, ONE),
        "two micro-batches": (1, TWO),
        "four micro-batches": (1, FOUR),
        "dynamic batches": (1, DYNAMIC),
        "DP 2": (2, ()),
        "DP 2, dynamic batches": (2, DYNAMIC),
        "TP 2, SP": (2, TP2_SP),
        "PP 2": (2, (*PP2, *TWO)),
        "CP 2": (2, CP2),
        "CP 2, one micro-batch": (2, (*CP2, *ONE)),
        "CP 2, dynamic batches": (2, (*CP2, *DYNAMIC)),
    }.items()
}


def kind_of(name):
    return next((kind for kind in BASELINES if kind and name.startswith(kind)), "")


def runs_of(table):
    """All runs of a test, (name, ranks, all flags): the baselines of its table first."""
    kinds = dict.fromkeys(kind_of(name) for name in table)
    baselines = [(f"{kind}one process", 1, (*SMOOTH, *BASELINES[kind])) for kind in kinds]
    layouts = [
        (name, ranks, (*SMOOTH, *BASELINES[kind_of(name)], *(() if set(flags) & OF_ITS_OWN else FOUR), *flags))
        for name, (ranks, flags) in table.items()
    ]
    return baselines + layouts


def traces_of(run_ranks, table, checkpoint, folder):
    """The metrics of each rollout, by name of the run; all that differs from the baseline fails."""
    names = [name for name, *_ in runs_of(globals()[table])]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    run_ranks(__file__, 2, table, str(checkpoint), str(folder), json.dumps(ports))
    traces = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    wrong = [
        f"{name}, rollout {number}: {metric} is {rollout.get(metric)}, not {expected.get(metric)}"
        for name, trace in traces.items()
        for number, (rollout, expected) in enumerate(zip(trace, traces[f"{kind_of(name)}one process"], strict=True))
        for metric in rollout.keys() | expected.keys()
        if rollout.get(metric) != pytest.approx(expected.get(metric), rel=RELATIVE, abs=ABSOLUTE)
    ]
    assert wrong == []
    return traces


def test_layouts_agree(run_ranks, tiny_checkpoint, tmp_path):
    traces = traces_of(run_ranks, "QUICK", tiny_checkpoint, tmp_path)

    start = traces["one process"]
    assert len(start) == ROLLOUTS and start[-1]["train/step"] == 2 * ROLLOUTS
    assert all(math.isfinite(value) for rollout in start for value in rollout.values())
    losses = [rollout["train/loss"] for rollout in start]
    assert abs(losses[0] - losses[1]) > 1e-3  # the steps do something, else agreement would mean little
    assert traces["kl one process"][1]["train/kl_loss"] > 1e-4
    for kind in ("kl ", "per token ", "gspo ", "corrections ", "reinforce ", "ppo "):
        assert abs(traces[f"{kind}one process"][1]["train/loss"] - losses[1]) > 1e-4, kind
    # So do clips, weights and masks.
    assert 0.1 < traces["gspo one process"][1]["train/pg_clipfrac"] < 0.9
    corrections = traces["corrections one process"][1]
    for name in ("tis_clipfrac", "rs_fraction", "rs_veto_fraction", "opsm_clipfrac"):
        assert 0.02 < corrections[f"train/{name}"] < 0.98, name
    assert start[1]["train/ppo_ratio_min"] < 0.9 and start[1]["train/ppo_ratio_max"] > 1.1

    # To the last bit: another process, and the same group a second time.
    assert traces["again"] == start
    assert traces["TP 2, SP again"] == traces["TP 2, SP"]
    assert traces["DP 2 again"] == traces["DP 2"]


@pytest.mark.slow
def test_layouts_agree_for_each_estimator(run_ranks, tiny_checkpoint, tmp_path):
    traces_of(run_ranks, "SLOW", tiny_checkpoint, tmp_path)


def closer(vocab_size, made_up_rollout=loss_trace.made_up_rollout):
    """The rollout of an engine closer to the trainer: few weights are 0 or 1."""
    batch = made_up_rollout(vocab_size)
    return batch.with_columns(rollout_log_probs=[0.2 * values - 5 for values in batch["rollout_log_probs"]])


def main(rank, table, checkpoint, folder, ports):
    loss_trace.made_up_rollout = closer
    runs = runs_of(globals()[table])
    # First each rank for itself, then both together.
    alone = [(name, 0, 1, flags) for name, ranks, flags in runs if ranks == 1][rank::2]
    for name, rank_, ranks, flags in alone + [(name, rank, 2, flags) for name, ranks, flags in runs if ranks == 2]:
        scratch = folder / f"{name}, rank {rank}"
        scratch.mkdir()
        config = loss_trace.trace_config(checkpoint, ranks, ROLLOUTS, [*flags], scratch)
        loss_trace.trace(rank_, ranks, config, ROLLOUTS, ports[name], folder / f"{name}.json")
        leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], sys.argv[5], Path(sys.argv[6]), json.loads(sys.argv[7]))
