"""Experts and interleaved or uneven pipeline stages change nothing but rounding; real gloo groups of two and four."""

import json
import sys
from pathlib import Path

import pytest

from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

ROLLOUTS = 2  # of two optimizer steps each
RELATIVE, ABSOLUTE = 5e-6, 5e-7

TP2_SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EP2 = ("--expert-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
UNEVEN = (*PP2, "--decoder-first-pipeline-num-layers", "1")
INTERLEAVED = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")
SIZES = ("--micro-batch-size", "3")
# Of a step of eight samples one process has eight micro-batches, a layout that says nothing of them four.
FEW = ("--micro-batch-size", "2")
TWO = {
    "EP 2": EP2,
    "EP 2, plain optimizer": (*EP2, "--no-use-distributed-optimizer"),
    "EP 2, dynamic batches": (*EP2, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"),
    "TP 2, SP, EP 2": (*TP2_SP, *EP2),
    "TP 2, SP, ETP 1": (*TP2_SP, "--expert-tensor-parallel-size", "1"),
    "CP 2, EP 2": (*CP2, *EP2),
    "PP 2, uneven": UNEVEN,
    "PP 2, interleaved": INTERLEAVED,
    "PP 2, interleaved, micro-batches of 3": (*INTERLEAVED, *SIZES),
    "PP 2, interleaved, full recompute": (
        *INTERLEAVED,
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
}
FOUR = {
    "TP 2, SP, PP 2": (*TP2_SP, *UNEVEN),
    "TP 2, SP, EP 2, DP 2": (*TP2_SP, *EP2),
    "TP 2, SP, EP 2, ETP 2": (*TP2_SP, *EP2, "--expert-tensor-parallel-size", "2"),
    "TP 2, SP, CP 2": (*TP2_SP, *CP2),
    "CP 2, PP 2": (*CP2, *INTERLEAVED),
    "CP 2, EP 2, DP 2": (*CP2, *EP2),
    "PP 2, EP 2": (*UNEVEN, *EP2),
    "PP 2, interleaved, EP 2": (*INTERLEAVED, *EP2),
    "PP 2, interleaved, DP 2": INTERLEAVED,
    "EP 4": ("--expert-model-parallel-size", "4"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[2],
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def check(run_ranks, checkpoint, folder, layouts, ranks):
    ports = dict(zip(("one process", *layouts), free_ports(1 + len(layouts)), strict=True))
    run_ranks(__file__, ranks, str(checkpoint), str(folder), json.dumps(ports))
    traces = {name: json.loads((folder / f"{name}.json").read_text()) for name in ports}
    start = traces["one process"]
    assert len(start) == ROLLOUTS and abs(start[0]["train/loss"] - start[1]["train/loss"]) > 1e-3
    wrong = [
        f"{name}, rollout {number}: {metric} is {rollout[metric]}, not {expected[metric]}"
        for name, trace in traces.items()
        for number, (rollout, expected) in enumerate(zip(trace, start, strict=True))
        for metric in rollout.keys() | expected.keys()
        if rollout[metric] != pytest.approx(expected[metric], rel=RELATIVE, abs=ABSOLUTE)
    ]
    assert wrong == []


def test_two_ranks(run_ranks, checkpoint, tmp_path):
    check(run_ranks, checkpoint, tmp_path, TWO, 2)


@pytest.mark.slow
def test_four_ranks(run_ranks, checkpoint, tmp_path):
    check(run_ranks, checkpoint, tmp_path, FOUR, 4)


def main(rank, world_size, checkpoint, folder, ports):
    def trace(name, rank, ranks, flags):
        scratch = folder / f"{name}, rank {rank}"
        scratch.mkdir()
        config = loss_trace.trace_config(checkpoint, ranks, ROLLOUTS, [*flags], scratch)
        loss_trace.trace(rank, ranks, config, ROLLOUTS, ports[name], folder / f"{name}.json")
        leave_world()

    if rank == 0:
        trace("one process", 0, 1, ())
    for name, flags in (TWO if world_size == 2 else FOUR).items():
        trace(
            name,
            rank,
            world_size,
            flags if {"--use-dynamic-batch-size", "--micro-batch-size"} & set(flags) else (*FEW, *flags),
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4], Path(sys.argv[5]), json.loads(sys.argv[6]))
