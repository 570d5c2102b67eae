"""The critic in several layouts against one process: values, metrics, the gradient of every parameter; checkpoints."""

import json
import sys
from pathlib import Path

import pytest
import torch

from miles.ray.resume import first_rollout
from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
# Gradients are whole on every rank.
PPO = ("--advantage-estimator", "ppo", "--critic-lr", "0.01", "--lambd", "0.9", "--no-use-distributed-optimizer")
VALUE_GAP = 2e-5  # measured: 2e-6
ROLLOUTS = 2  # of two optimizer steps each
LAYOUTS = {
    "TP 2, SP": (*TP2, "--sequence-parallel"),
    "TP 2": TP2,
    "PP 2": PP2,
    "CP 2": CP2,
    "DP 2": (),
}


def test_layouts_agree(run_ranks, tiny_checkpoint, tmp_path):
    """Weights are those of the checkpoint, values are zero at first, and every layout learns the same."""
    from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint

    sizes = dict(hidden_size=64, num_layers=2, head_dim=16, intermediate_size=128, init_std=0.1)
    make_tiny_checkpoint(tmp_path / "untied", **sizes, tie=False)
    checkpoints = json.dumps([str(tiny_checkpoint), str(tmp_path / "untied")])
    run_ranks(__file__, 2, "layouts", str(tmp_path), checkpoints, json.dumps(free_ports(2 + 2 * len(LAYOUTS))))


def test_checkpoints(run_ranks, tiny_checkpoint, tmp_path):
    """A loaded critic goes on as the one that was saved; an actor's checkpoint is none of a critic."""
    run_ranks(__file__, 2, "checkpoints", str(tmp_path), str(tiny_checkpoint), json.dumps(free_ports(5)))


# --- what the ranks run ---


def built(rank, ranks, checkpoint, folder, flags, port):
    """A critic, its shard of the made-up rollout, and one with every token masked."""
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.critic import MegatronCriticRayActor
    from miles.ray.train.group import critic_config

    folder.mkdir(exist_ok=True)
    config = loss_trace.trace_config(checkpoint, ranks, ROLLOUTS, [*PPO, *flags], folder)
    critic = MegatronCriticRayActor(critic_config(config), rank, ranks)
    critic.init(f"127.0.0.1:{port}")
    of_rollout = (config, critic.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank())
    return critic, loss_trace.made_up_shard(*of_rollout), loss_trace.made_up_shard(*of_rollout, masked=True)


def trained(critic, shard, rollouts=range(ROLLOUTS)):
    """A list of each rollout's metrics, and one of the values before it by sample."""
    lines, values = [], []
    for _ in rollouts:
        metrics, found = critic.train_values(shard)
        lines.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})
        if found is not None:  # the last pipeline stage
            rows = enumerate(shard.batch["sample_indices"])
            offsets = shard.batch.response_offsets
            values.append({int(index): found[slice(*offsets[row : row + 2])] for row, index in rows})
    return lines, values


def gradients(critic):
    return {name: p.main_grad.clone() for model in critic.model.state.models for name, p in model.named_parameters()}


def fresh_model(critic):
    """The language model that the critic was made of, without weights."""
    from miles.backends.megatron_utils.model import build_model

    return build_model(critic.config, critic.model.hf_config)


def by_name(chunks):
    return {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}


def head_of(found):
    return {name: found.pop(name) for name in list(found) if name.startswith("output_layer.")}


def learn_alone(checkpoint, folder, port):
    """One process: what the others are compared with; its gradients as a Hugging Face checkpoint, to be cut anew."""
    from miles.backends.megatron_utils.hf_weights import load_into
    from miles.backends.megatron_utils.weight_source import MegatronWeights
    from miles.hf.checkpoint import CheckpointIndex
    from miles.weight_sync.export import save_hf

    critic, shard, _ = built(0, 1, checkpoint, folder / "scratch", (), port)
    language_model, own = fresh_model(critic), critic.model.chunks
    described = (critic.model.family, critic.model.hf_config)
    load_into(language_model, *described, checkpoint, critic.model.parallel)
    weights, loaded = by_name(own), by_name(language_model)
    head = head_of(weights)
    head_of(loaded)
    assert {name: tuple(p.shape) for name, p in head.items()} == {
        "output_layer.weight": (1, 64),
        "output_layer.bias": (1,),
    }
    assert not any(parameter.any() for parameter in head.values())
    assert weights.keys() == loaded.keys() and all(torch.equal(weights[name], loaded[name]) for name in weights)

    values_are_those_of_transformers(critic, shard, checkpoint)

    lines, values = trained(critic, shard)
    assert not any(value.any() for value in values[0].values())
    assert all(value.abs().max() > 0.01 for value in values[1].values())
    losses = [line["critic-train/value_loss"] for line in lines]
    assert losses[0] > 1.2 * losses[1] > 0, losses
    assert lines[1]["critic-train/step"] == 2 * ROLLOUTS and lines[0]["critic-train/lr-pg_0"] == 0.01
    found = gradients(critic)
    head = head_of(found)
    for name, parameter in by_name(language_model).items():
        parameter.data.copy_(found[name] if name in found else torch.zeros_like(parameter))
    assert all(gradient.abs().max() > 1e-6 for gradient in found.values())
    weights = MegatronWeights(language_model, *described, critic.model.parallel, CheckpointIndex(checkpoint))
    save_hf(str(folder / "gradients"), weights, True, critic.agreement)
    torch.save({"lines": lines, "values": values, "head": head}, folder / "alone.pt")
    leave_world()


def values_are_those_of_transformers(critic, shard, checkpoint):
    """With another head, which is zero again afterwards: the value before a token knows all tokens before it."""
    from transformers import AutoModel

    weight, bias = head_of(by_name(critic.model.chunks)).values()
    weight.data.normal_()
    bias.data.fill_(0.5)
    (values,) = critic.trainer.scores(shard)
    model = AutoModel.from_pretrained(checkpoint)
    for row in range(len(shard.batch)):
        tokens, ours = shard.batch.row("tokens", row), shard.batch.row("loss_masks", row)
        with torch.no_grad():
            hidden = model(torch.tensor(tokens)[None].long()).last_hidden_state[0]
            want = (hidden @ weight[0] + bias)[-len(ours) - 1 : -1]
        start, end = shard.batch.response_offsets[row : row + 2]
        torch.testing.assert_close(values[start:end], want, rtol=0, atol=2e-4)
    weight.data.zero_()
    bias.data.zero_()


def compare(name, critic, lines, values, alone, folder):
    from miles.backends.megatron_utils.hf_weights import load_into

    language_model, found = fresh_model(critic), gradients(critic)
    load_into(language_model, critic.model.family, critic.model.hf_config, folder / "gradients", critic.model.parallel)
    head, expected = head_of(found), by_name(language_model)
    head_of(expected)
    assert expected.keys() == found.keys()
    expected |= alone["head"] if head else {}
    for parameter, gradient in (found | head).items():
        want = expected[parameter].detach()
        error = ((gradient - want).abs().max() / want.abs().max()).item()
        assert error < 1e-4, f"{name}: the gradient of {parameter} differs by {error}"
    for got, want in zip(values, alone["values"], strict=bool(values)):
        for sample, value in got.items():
            gap = (value - want[sample]).abs().max()
            assert gap < VALUE_GAP, f"{name}: the values of {sample} differ by {gap}"
    for got, want in zip(lines, alone["lines"], strict=True):
        assert not got or got == pytest.approx(want, rel=1e-5, abs=1e-6), name


def layouts(rank, folder, checkpoints, ports):
    # First each rank for itself, with a model of its own, then both together.
    own = folder / f"model {rank}"
    own.mkdir()
    learn_alone(checkpoints[rank], own, ports[rank])
    ports = iter(ports[2:])
    for model, checkpoint in enumerate(checkpoints):
        reference = folder / f"model {model}"
        for name, flags in LAYOUTS.items():
            port = next(ports)
            if model == 1 and name not in ("PP 2", "TP 2, SP"):  # the output layer makes no difference elsewhere
                continue
            critic, shard, _ = built(rank, 2, checkpoint, folder / f"rank {rank}", flags, port)
            alone = torch.load(reference / "alone.pt")
            lines, values = trained(critic, shard)
            assert bool(lines[0]) == (rank == (1 if name == "PP 2" else 0)), f"{name}: one rank reports"
            compare(f"{name}, model {model}", critic, lines, values, alone, reference)
            leave_world()


def checkpoints(rank, folder, checkpoint, ports):
    from miles.backends.megatron_utils.actor import MegatronTrainRayActor
    from miles.utils.checkpoint_folder import finish_checkpoint

    def saved(name, rank, ranks, flags, port):
        """Trains two rollouts, with a checkpoint after the first; returns what the second was like."""
        flags = (*flags, "--save", str(folder / name))
        critic, shard, _ = built(rank, ranks, checkpoint, folder / f"{name}, rank {rank}", flags, port)
        trained(critic, shard, range(1))
        critic.save(0)
        second = trained(critic, shard, range(1))
        if rank == 0:
            finish_checkpoint(folder / f"{name}_critic", 0)
        leave_world()
        return second

    def resumed(source, port):
        flags = ("--critic-load", str(folder / f"{source}_critic"))
        critic, shard, masked = built(0, 1, checkpoint, folder / f"resumed {source}", flags, port)
        assert first_rollout(critic.config) == 1
        # It leaves nothing behind: the caller compares what comes after it.
        ((skipped,), _) = trained(critic, masked, range(1))
        assert skipped["critic-train/skipped_steps"] == 2 and skipped["critic-train/step"] == 2
        second = trained(critic, shard, range(1))
        leave_world()
        return second

    together = saved("TP", rank, 2, LAYOUTS["TP 2, SP"], ports[0])
    if rank == 1:
        (folder / "actor").mkdir()
        config = loss_trace.trace_config(checkpoint, 1, 1, ["--save", str(folder / "actor")], folder / "actor")
        actor = MegatronTrainRayActor(config, 0, 1)
        actor.init(f"127.0.0.1:{ports[4]}")
        actor.save(0)
        finish_checkpoint(folder / "actor", 0)
        leave_world()
        flags = ("--critic-load", str(folder / "actor"))
        with pytest.raises(ValueError, match="holds no critic"):
            built(0, 1, checkpoint, folder / "actor as critic", flags, ports[4])
        leave_world()
        return
    lines, values = saved("alone", 0, 1, (), ports[1])
    again, values_again = resumed("alone", ports[2])
    assert again == lines and all(torch.equal(values_again[0][sample], v) for sample, v in values[0].items())
    again, values_again = resumed("TP", ports[3])
    assert again[0] == pytest.approx(together[0][0], rel=1e-5, abs=1e-6)
    for sample, value in together[1][0].items():
        assert (values_again[0][sample] - value).abs().max() < VALUE_GAP


if __name__ == "__main__":
    torch.set_num_threads(1)
    test, arguments = sys.argv[4], sys.argv[6:]
    if test == "layouts":
        layouts(int(sys.argv[1]), Path(sys.argv[5]), *map(json.loads, arguments))
    else:
        checkpoints(int(sys.argv[1]), Path(sys.argv[5]), arguments[0], json.loads(arguments[1]))
