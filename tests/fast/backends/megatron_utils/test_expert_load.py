"""Counts of experts' tokens, the selection bias that moves by them, and frozen routers, in a real rank's steps."""

import json
import sys
from pathlib import Path

from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

RATE, TOPK = 0.0625, 4
# All samples in one step; layers are computed again in the backward pass, and a token counts once all the same.
STEP = ("--global-batch-size", "16")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


def test_load_bias_and_frozen_routers(run_ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.fast.backends.megatron_utils.families.data.deepseek_v3 import CASES

    model = AutoModelForCausalLM.from_config(CASES["groups"])
    model.save_pretrained(tmp_path / "checkpoint")
    run_ranks(__file__, 1, str(tmp_path / "checkpoint"), str(tmp_path), json.dumps(free_ports(2)))


def main(checkpoint, folder, ports):
    import torch

    torch.set_num_threads(1)
    flags = (*STEP, *RECOMPUTE, "--moe-router-bias-update-rate", str(RATE))
    run(checkpoint, folder / "moved", ports[0], flags, check_bias)
    run(checkpoint, folder / "frozen", ports[1], (*STEP, "--moe-router-freeze-gate"), check_frozen)


def run(checkpoint, folder, port, flags, check):
    from miles.backends.megatron_utils.actor import MegatronTrainRayActor

    folder.mkdir()
    actor = MegatronTrainRayActor(loss_trace.trace_config(checkpoint, 1, 1, [*flags], folder), 0, 1)
    actor.init(f"127.0.0.1:{port}")
    check(actor, loss_trace.made_up_shard(actor.config, actor.model.hf_config.vocab_size, 0))
    leave_world()


def check_bias(actor, shard):
    import torch

    from miles.backends.megatron_utils.parts.expert_layer import ExpertLayer

    layers = [part for chunk in actor.model.chunks for part in chunk.modules() if isinstance(part, ExpertLayer)]
    biases = [layer.router.expert_bias for layer in layers]
    before = [bias.clone() for bias in biases]
    metrics = actor.train(0, shard)
    loads = []
    for layer, bias, old in zip(layers, biases, before, strict=True):
        counts = layer.tokens_E
        assert counts.sum() == TOPK * shard.batch.total_lengths.sum(), "padding, or a token twice"
        assert torch.equal(bias, old + RATE * torch.sign(counts.float().mean() - counts)) and not torch.equal(bias, old)
        loads.append(counts / counts.float().mean())
    loads = torch.stack(loads)
    assert metrics["train/moe/load_max"] == loads.max() > 1 > loads.min() == metrics["train/moe/load_min"]
    assert metrics["train/moe/unused"] == (loads == 0).float().mean()

    # A step that is skipped moves nothing.
    moved, actor.model.gradient_norm = [bias.clone() for bias in biases], lambda: float("nan")
    assert actor.train(1, shard)["train/skipped_steps"] == 1
    assert all(torch.equal(*pair) for pair in zip(biases, moved, strict=True))


def check_frozen(actor, shard):
    import torch

    (chunk,) = actor.model.chunks
    before = {name: value.clone() for name, value in chunk.state_dict().items() if isinstance(value, torch.Tensor)}
    actor.train(0, shard)
    same = {name for name, value in before.items() if torch.equal(chunk.state_dict()[name], value)}
    assert same == {name for name in before if "router." in name} and same


if __name__ == "__main__":
    main(sys.argv[4], Path(sys.argv[5]), json.loads(sys.argv[6]))
