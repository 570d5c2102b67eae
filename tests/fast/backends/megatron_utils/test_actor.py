"""What an actor does around its optimizer steps: weights of others, the forward passes that it makes, custom losses."""

import json
import sys
from pathlib import Path

import pytest

from miles.ray.resume import first_rollout
from miles.utils.errors import UserError
from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

ONE_STEP = ("--global-batch-size", "16")
KL = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3")
MOVING = (*KL, "--ref-update-interval", "2", "--tensor-model-parallel-size", "2")
KEPT = ("--keep-old-actor",)
LOSS = "tests.fast.backends.megatron_utils.test_actor.reinforce"
SAVED_AFTER = 2
ROLLOUTS = {"moving reference": 4, "resumed": 4}  # of two, all others
APART = ("--pipeline-model-parallel-size", "2", "--max-logprob-abs-diff", "1e-3")

# name -> (ranks, flags)
RUNS = {
    "plain": (1, ()),
    "one step": (1, ONE_STEP),
    "other": (1, ()),
    "taught": (1, ("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "OTHER")),
    "kept": (1, KEPT),
    "kept, sent asleep": (1, KEPT),
    "bf16": (1, ("--bf16",)),
    "bf16, kept, sent asleep": (1, (*KEPT, "--bf16", "--rematerialize-param-from-master-weight")),
    "spared": (1, (*ONE_STEP, "--skip-actor-forward-only")),
    "engine's": (1, ("--use-rollout-logprobs",)),
    "custom": (1, (*ONE_STEP, "--loss-type", "custom_loss", "--custom-loss-function-path", LOSS)),
    "moving reference": (2, MOVING),
    "resumed": (2, MOVING),
    "apart": (2, APART),
}


def reinforce(config, log_probs_N, entropy_N, packed, sums):
    """A custom loss: -A log p, whose gradient is that of the clipped loss at a ratio of 1."""
    from miles.training.losses import weighted_sum

    loss = weighted_sum(-log_probs_N * packed.columns["advantages"], packed.weight_N)
    return loss, {"train/loss": loss}


def test_actor(run_ranks, tiny_checkpoint, tmp_path):
    ports = dict(zip(RUNS, free_ports(len(RUNS)), strict=True))
    run_ranks(__file__, 2, str(tiny_checkpoint), str(tmp_path), json.dumps(ports))
    results = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in RUNS}
    the_reference_follows_and_a_resumed_run_has_it(results)
    the_old_policy_is_what_the_engines_got_last(results)
    a_teacher_is_another_model(results)
    passes_are_spared(results)
    a_custom_loss(results)
    assert results["apart"] == ["refused", "refused"]


def the_reference_follows_and_a_resumed_run_has_it(results):
    straight = results["moving reference"]
    reference = [rollout["rollout/ref_log_probs"] for rollout in straight]
    policy = [rollout["rollout/log_probs"] for rollout in straight]
    assert reference[0] == reference[1] == policy[0]
    # The policy after rollout 1, for two more.
    assert reference[2] == reference[3] == policy[2] != policy[3]
    assert straight[1]["train/kl_loss"] > 1e-5
    assert results["resumed"] == straight[SAVED_AFTER + 1 :]


def the_old_policy_is_what_the_engines_got_last(results):
    plain, kept = results["plain"], results["kept"]
    # Nothing was sent: the weights of the start.
    assert kept[0] == plain[0]
    assert kept[1]["rollout/log_probs"] == plain[0]["rollout/log_probs"] != plain[1]["rollout/log_probs"]
    # Sent while the trainer slept, they are those that it wakes up with.
    assert results["kept, sent asleep"] == plain
    assert results["bf16, kept, sent asleep"] == results["bf16"] != plain


def a_teacher_is_another_model(results):
    plain, taught, other = results["plain"], results["taught"], results["other"]
    assert taught[0]["rollout/log_probs"] == plain[0]["rollout/log_probs"]
    teacher = taught[0]["rollout/teacher_log_probs"]
    assert teacher == taught[1]["rollout/teacher_log_probs"] == other[0]["rollout/log_probs"]
    gap = taught[0]["rollout/log_probs"] - teacher
    assert taught[0]["rollout/opd_reverse_kl"] == pytest.approx(gap, abs=1e-6) and abs(gap) > 0.01
    assert taught[0]["rollout/advantages"] == pytest.approx(plain[0]["rollout/advantages"] - gap, abs=1e-6)


def passes_are_spared(results):
    def passes(name):
        return [rollout["log_probs passes"] for rollout in results[name]]

    assert passes("plain") == passes("one step") == [1, 1]
    # Once, to compare trainer and engine.
    assert passes("spared") == passes("engine's") == [1, 0]
    for rollout, expected in zip(results["spared"], results["one step"], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/train_rollout_kl"):
            assert rollout[name] == pytest.approx(expected[name], rel=1e-6), name
        assert "rollout/log_probs" not in rollout


def a_custom_loss(results):
    for rollout, expected in zip(results["custom"], results["one step"], strict=True):
        assert rollout["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
        assert "train/pg_loss" not in rollout
    assert results["custom"][0]["train/loss"] != pytest.approx(results["one step"][0]["train/loss"], rel=0.01)


class Engines:
    """In place of the weight sync: engines that only count."""

    def update(self, version):
        return {}


def main(rank, checkpoint, folder, ports):
    import torch
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor
    from miles.utils.checkpoint_folder import finish_checkpoint

    torch.set_num_threads(1)
    other = other_checkpoint(checkpoint, folder / f"other checkpoint {rank}")
    alone = [(name, 0, 1) for name, (ranks, _) in RUNS.items() if ranks == 1][rank::2]
    for name, rank_, ranks in alone + [(name, rank, 2) for name, (ranks, _) in RUNS.items() if ranks == 2]:
        scratch = folder / f"{name}, scratch {rank}"
        scratch.mkdir()
        flags = [str(other) if flag == "OTHER" else flag for flag in RUNS[name][1]]
        if ranks == 2:
            flags += [
                "--save",
                str(folder / "saved"),
                *(("--load", str(folder / "saved")) if name == "resumed" else ()),
            ]
        source, sleeps = (other if name == "other" else checkpoint), "asleep" in name
        config = loss_trace.trace_config(str(source), ranks, ROLLOUTS.get(name, 2), flags, scratch, sleep=sleeps)
        actor = MegatronTrainRayActor(config, rank_, ranks)
        actor.init(f"127.0.0.1:{ports[name]}")
        actor.updater = Engines()
        mine = loss_trace.made_up_shard(
            config, actor.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank()
        )
        lines = []
        if name == "apart":
            lines = refusals(actor, mine)
        for rollout_id in range(first_rollout(actor.config), config.num_rollout if name != "apart" else 0):
            metrics = actor.train(rollout_id, mine)
            lines.append({key: value for key, value in metrics.items() if not key.startswith("perf/")})
            lines[-1]["log_probs passes"] = int("perf/log_probs_time" in metrics)
            if sleeps:
                actor.sleep()
                actor.update_weights(rollout_id)
            if name == "moving reference" and rollout_id == SAVED_AFTER:
                actor.save(rollout_id)
                if rank == 0:
                    finish_checkpoint(folder / "saved", rollout_id)
        if rank_ == 0:
            (folder / f"{name}.json").write_text(json.dumps(lines))
        leave_world()


def refusals(actor, mine):
    """What each rank says to an engine that holds another model; none may wait for the other."""
    import torch.distributed as dist

    with pytest.raises(UserError, match="the two do not hold the same model"):
        actor.train(0, mine)
    said = [None, None]
    dist.all_gather_object(said, "refused")
    return said


def other_checkpoint(checkpoint, folder):
    """The same architecture with other weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * 1.25 for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], Path(sys.argv[5]), json.loads(sys.argv[6]))
