"""What every trainer does, done by Megatron's and by a second one: plain PyTorch over a transformers model.

Each process is one trainer in a world of its own. What a trainer does with and without a sleep or a restart is equal to
the bit; between the two it agrees to rounding, forward and backward.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from miles.backends.megatron_utils.launch import MEGATRON
from miles.utils.errors import UserError
from miles.utils.network import free_ports
from tests.fast.ranks import leave_world

ROOT = Path(__file__).parents[4]
# The classes of an actor and a critic; the others are compared with the first.
TRAINERS = {
    "plain": (
        "tests.fast.backends.trainer.plain.PlainTrainRayActor",
        "tests.fast.backends.trainer.plain.PlainCriticRayActor",
    ),
    "megatron": (MEGATRON.actor, MEGATRON.critic),
}
ROLLOUTS = 3  # of two optimizer steps each
SAVED_AFTER = 0
# The reference moves, so that a checkpoint has one; entropy, so that its gradient counts.
KL = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--ref-update-interval", "2")
FLAGS = (*KL, "--entropy-coef", "0.01", "--rollout-temperature", "0.8", "--micro-batch-size", "3", "--clip-grad", "0.5")
RESIDENCY = ("--offload-train-target", "disk")
CASES = ("straight", "asleep", "saved", "resumed", "fresh optimizer", "critic", "gradients", "another model")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny_checkpoint(folder, num_layers=2, hidden_size=64, head_dim=16, init_std=0.2, intermediate_size=128)
    return folder


def test_trainers(run_ranks, checkpoint, tmp_path):
    ports = free_ports(len(TRAINERS) * len(CASES))
    run_ranks(__file__, len(TRAINERS), str(checkpoint), str(tmp_path), *map(str, ports))
    for trainer in TRAINERS:
        results = {name: json.loads((tmp_path / f"{trainer}, {name}.json").read_text()) for name in CASES}
        nothing_else_changes_a_bit(results, trainer)
    they_agree_to_rounding(tmp_path)


def nothing_else_changes_a_bit(results, trainer):
    straight = results["straight"]
    assert len(straight) == ROLLOUTS and straight[0]["train/grad_norm"] > 0.5 and straight[1]["train/kl_loss"] > 1e-6
    assert straight[0]["train/loss"] != straight[1]["train/loss"], trainer
    assert results["asleep"] == straight, trainer
    assert results["saved"] == straight, trainer
    assert results["resumed"] == straight[SAVED_AFTER + 1 :], trainer
    fresh = results["fresh optimizer"]
    assert fresh[0]["rollout/log_probs"] == straight[1]["rollout/log_probs"], trainer
    assert fresh[0]["train/step"] != straight[1]["train/step"], trainer
    assert fresh[1]["rollout/log_probs"] != straight[2]["rollout/log_probs"], trainer
    assert results["another model"] == ["refused"], trainer


def they_agree_to_rounding(folder):
    reference, *others = TRAINERS
    for trainer in others:
        for name, bound in (("straight", 2e-6), ("critic", 1e-5)):
            ours, theirs = (json.loads((folder / f"{who}, {name}.json").read_text()) for who in (trainer, reference))
            for rollout, other in zip(ours, theirs, strict=True):
                assert rollout.keys() == other.keys()
                for metric, value in rollout.items():
                    assert value == pytest.approx(other[metric], rel=2e-5, abs=bound), f"{trainer}, {name}, {metric}"
        ours, theirs = (torch.load(folder / f"{who}, gradients.pt") for who in (trainer, reference))
        assert ours.keys() == theirs.keys() and len(ours) > 20
        for name, gradient in ours.items():
            largest = theirs[name].abs().max().item()
            assert largest > 0, name
            assert (gradient - theirs[name]).abs().max().item() < 1e-5 * largest, f"{trainer}, {name}"


# --- what the trainers run ---


def main(trainer, checkpoint, folder, ports):
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("loss_trace", ROOT / "scripts" / "loss_trace.py")
    tracing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tracing)
    for name, port in zip(CASES, ports, strict=True):
        scratch = folder / f"{trainer}, {name}"
        scratch.mkdir()
        result = run(tracing, trainer, name, checkpoint, folder, scratch, port)
        (folder / f"{trainer}, {name}.json").write_text(json.dumps(result))
        leave_world()


def run(tracing, trainer, name, checkpoint, folder, scratch, port):
    from miles.ray.train.group import critic_config

    saved, export = folder / f"{trainer}, saved here", scratch / "export"
    flags = [*FLAGS, "--save", str(saved), "--save-hf", str(export)]
    flags += ["--load", str(saved)] if name in ("resumed", "fresh optimizer") else []
    flags += ["--no-load-optim"] if name == "fresh optimizer" else []
    flags += [*RESIDENCY, "--offload-train-disk-dir", str(scratch)] if name == "asleep" else []
    flags += ["--max-logprob-abs-diff", "1e-3"] if name == "another model" else []
    if name == "critic":
        flags = ["--advantage-estimator", "ppo", "--critic-lr", "0.01", "--clip-grad", "0.5"]
    config = tracing.trace_config(checkpoint, 1, ROLLOUTS, flags, scratch, sleep=name == "asleep")
    actor_path, critic_path = TRAINERS[trainer]
    if name == "critic":
        config, actor_path = critic_config(config), critic_path
    module, class_name = actor_path.rsplit(".", 1)
    actor = getattr(importlib.import_module(module), class_name)(config, 0, 1)
    actor.init(f"127.0.0.1:{port}")
    shard = tracing.made_up_shard(config, actor.model.hf_config.vocab_size, actor.model.grid.dp_rank)
    match name:
        case "critic":
            return train_critic(actor, shard)
        case "gradients":
            return [export_gradients(actor, shard, export, folder / f"{trainer}, gradients.pt")]
        case "another model":
            with pytest.raises(UserError, match="the two do not hold the same model"):
                actor.train(0, shard)
            return ["refused"]
        case _:
            return train(name, actor, shard)


def train(name, actor, shard):
    from miles.ray.resume import first_rollout
    from miles.utils.checkpoint_folder import finish_checkpoint

    lines = []
    for rollout_id in range(first_rollout(actor.config), ROLLOUTS):
        metrics = actor.train(rollout_id, shard)
        lines.append({key: value for key, value in metrics.items() if not key.startswith("perf/")})
        if name == "asleep":
            sleep_and_save(actor, rollout_id)
        if name == "saved" and rollout_id == SAVED_AFTER:
            actor.save(rollout_id)
            finish_checkpoint(actor.config.save, rollout_id)
    return lines


def sleep_and_save(actor, rollout_id):
    """Everything leaves memory, once; it can be read, saved and exported, and stays away."""
    weights = [weight for weight in actor.model.weights() if isinstance(weight, torch.nn.Parameter)]
    before = [weight.detach().clone() for weight in weights]
    assert actor.sleep()["perf/sleep_bytes"] >= 12 * sum(weight.numel() for weight in weights)
    assert actor.sleep() == {} and actor.residency.asleep
    assert all(weight.untyped_storage().nbytes() == 0 for weight in weights)
    read = actor.residency.read_weight
    assert all(torch.equal(read(weight), value) for weight, value in zip(weights, before, strict=True))
    assert all(torch.equal(read(weight, 1), value[1]) for weight, value in zip(weights, before, strict=True))
    if rollout_id == 0:
        actor.save(rollout_id)
        actor.export_hf(rollout_id)
        assert actor.residency.asleep and all(weight.untyped_storage().nbytes() == 0 for weight in weights)
    if rollout_id == 1:  # else train() does it
        assert actor.wake_up()["perf/wake_up_time"] > 0
        assert actor.wake_up() == {} and all(torch.equal(*pair) for pair in zip(weights, before, strict=True))


def train_critic(critic, shard):
    """Metrics of each rollout, and the first values before it."""
    lines = []
    for _ in range(ROLLOUTS):
        metrics, values = critic.train_values(shard)
        lines.append({key: value for key, value in metrics.items() if not key.startswith("perf/")})
        lines[-1] |= {f"value {number}": value for number, value in enumerate(values[:20].tolist())}
    assert lines[0]["value 0"] == 0 != lines[1]["value 0"]
    return lines


def export_gradients(actor, shard, export, path):
    """The gradient of the first step, under the checkpoint's names: written like weights."""
    from safetensors.torch import load_file

    (step, *_), columns = shard.steps, {"old_log_probs": actor.trainer.log_probs(shard)}
    columns |= {"ref_log_probs": columns["old_log_probs"] * 0.9, "advantages": columns["old_log_probs"]}
    micro_batches = [actor.trainer._pack(shard, rows, columns) for rows in step.micro_batches]
    actor.model.begin_step(micro_batches)
    actor.model.run(micro_batches, actor.trainer._loss, forward_only=False)
    norm = actor.model.gradient_norm()
    with torch.no_grad():
        for weight in actor.model.weights():
            if isinstance(weight, torch.nn.Parameter):
                weight.copy_(weight.main_grad if hasattr(weight, "main_grad") else weight.grad)
    actor.export_hf(0)
    torch.save(
        {name: weight for file in export.glob("*.safetensors") for name, weight in load_file(file).items()}, path
    )
    return norm


if __name__ == "__main__":
    number = int(sys.argv[1])
    main([*TRAINERS][number], sys.argv[4], Path(sys.argv[5]), sys.argv[6:][number :: len(TRAINERS)])
