"""Steps that teach nothing change nothing, on any rank; reset moments are those of a new optimizer.

A step teaches nothing if its gradient is not finite, or if none of its tokens counts.
"""

import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

STEPS = 2  # of a rollout
BF16 = ("--bf16",)
PLAIN = ("--no-use-distributed-optimizer",)
STREAMED = ("--stream-optimizer-state-to-disk", "--offload-train-disk-chunk-mb", "1")
EP2 = ("--expert-model-parallel-size", "2")
RESET = ("--reset-optimizer-states",)

# name -> (ranks, flags, what goes wrong: a reward of the last data-parallel rank, or the gradients of the last rank)
SKIPPED = {
    "alone": (1, (), math.nan),
    "bf16": (1, BF16, 3e38),
    "plain": (1, PLAIN, -math.inf),
    "streamed": (1, STREAMED, math.nan),
    "bf16 streamed": (1, (*BF16, *STREAMED), 3e38),
    "DP 2": (2, (), "gradients"),
    "DP 2, overlapped": (2, ("--overlap-grad-reduce", "--overlap-param-gather"), "gradients"),
    "DP 2, plain": (2, PLAIN, math.nan),
    "DP 2, bf16 streamed": (2, (*BF16, *STREAMED), "gradients"),
    "TP 2, SP": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel"), "gradients"),
    "PP 2": (2, ("--pipeline-model-parallel-size", "2"), "gradients"),
    "EP 2": (2, EP2, "gradients"),
    "EP 2, plain": (2, (*EP2, *PLAIN), "gradients"),
}
QUICK = ("alone", "bf16 streamed", "DP 2", "DP 2, plain", "PP 2", "EP 2")
# name -> (flags, the run that must give the same). There the test makes a new optimizer by hand. With "asleep" the
# trainer sleeps before each rollout. The plain optimizer has such a run of its own: its gradients are the distributed
# one's to the bit, but the norm is added up over the parameters in another order, and clipping takes its last bits on.
MOMENTS = {
    "fp32": ((), None),
    "fp32 plain": (PLAIN, None),
    "fp32, reset": (RESET, "fp32"),
    "fp32, reset asleep": (RESET, "fp32"),
    "fp32, reset streamed": ((*RESET, *STREAMED), "fp32"),
    "fp32, reset plain": ((*RESET, *PLAIN), "fp32 plain"),
    "bf16": (BF16, None),
    "bf16, reset": ((*RESET, *BF16), "bf16"),
    "bf16, reset streamed asleep": ((*RESET, *BF16, *STREAMED), "bf16"),
    "not reset": ((), None),
}


@pytest.fixture
def experts_checkpoint(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "experts")
    return tmp_path / "experts"


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(SKIPPED.keys() - set(QUICK)), marks=pytest.mark.slow)], ids=["quick", "others"]
)
def test_skipped_steps(run_ranks, tiny_checkpoint, experts_checkpoint, tmp_path, names):
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    arguments = str(tiny_checkpoint), str(experts_checkpoint), str(tmp_path), json.dumps(ports)
    run_ranks(__file__, 2, "skipped", *arguments)
    for name in names:
        ranks = SKIPPED[name][0]
        results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{name}, rank ?.json"))]
        assert len(results) == ranks
        for result in results:
            start, masked_first, trained, spoiled, continued, masked, equal, spoiled_again, masked_again, stopped = (
                result["digests"]
            )
            assert start == masked_first, f"{name}: a skipped step left traces"
            assert len({start, trained, continued, equal}) == 4, name
            assert spoiled == trained, f"{name}: a skipped step left traces"
            assert masked == continued, f"{name}: a skipped step left traces"
            assert spoiled_again == masked_again == stopped == equal, f"{name}: a skipped step left traces"
            assert result["scheduler"] == [0, 2, 2, 4, 4, 6, 6, 6, 6], name
            # Two in the rollout before it, a third that is allowed, and the one too many.
            assert "4 times in a row (--max-nonfinite-steps 3)" in result["error"], name
        (metrics,) = [result["metrics"] for result in results if result["metrics"][0]]
        assert [rollout["train/skipped_steps"] for rollout in metrics] == [2, 0, 2, 0, 2, 0, 2, 2], name
        not_finite = [any(not math.isfinite(value) for value in rollout.values()) for rollout in metrics]
        assert not_finite == [False, False, True, False, False, False, True, False], name
        assert not math.isfinite(metrics[2]["train/grad_norm"]), name
        # Advantages of zero are no gradient, but the tokens count: Adam's momentum goes on.
        assert metrics[5]["train/grad_norm"] == 0 or name.startswith("EP"), name


def test_reset_optimizer_states(run_ranks, tiny_checkpoint, tmp_path):
    ports = dict(zip(MOMENTS, free_ports(len(MOMENTS)), strict=True))
    run_ranks(__file__, 2, "moments", str(tiny_checkpoint), "", str(tmp_path), json.dumps(ports))
    results = {name: json.loads((tmp_path / f"{name}, rank 0.json").read_text()) for name in MOMENTS}
    assert results["not reset"] != results["fp32"]
    for name, (_, source) in MOMENTS.items():
        if source is not None:
            assert results[name] == results[source], name


def main(rank, kind, checkpoint, experts, folder, ports):
    import torch

    torch.set_num_threads(1)
    if kind == "moments":
        # Each rank for itself, every second one.
        runs = [(name, 0, 1, flags, None) for name, (flags, _) in MOMENTS.items()][rank::2]
    else:
        mine = [(name, *SKIPPED[name]) for name in ports]
        alone = [(name, 0, ranks, flags, cause) for name, ranks, flags, cause in mine if ranks == 1][rank::2]
        runs = alone + [(name, rank, ranks, flags, cause) for name, ranks, flags, cause in mine if ranks == 2]
    for name, rank_, ranks, flags, cause in runs:
        scratch = folder / f"{name}, scratch {rank}"
        scratch.mkdir()
        if STREAMED[0] in flags:
            flags = (*flags, "--offload-train-disk-dir", str(scratch))
        source = experts if name.startswith("EP") else checkpoint
        config = loss_trace.trace_config(source, ranks, 5, [*flags], scratch, sleep="asleep" in name)
        run = build(config, rank_, ranks, ports[name])
        result = moments(*run, name) if kind == "moments" else skipped(*run, cause, fails=rank_ == ranks - 1)
        (folder / f"{name}, rank {rank_}.json").write_text(json.dumps(result))
        leave_world()


def build(config, rank, ranks, port):
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor

    actor = MegatronTrainRayActor(config, rank, ranks)
    actor.init(f"127.0.0.1:{port}")
    of_rollout = (config, actor.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank())
    return actor, loss_trace.made_up_shard(*of_rollout), loss_trace.made_up_shard(*of_rollout, masked=True)


def moments(actor, shard, _, name):
    """Metrics of two rollouts and what is left after them."""
    from miles.backends.megatron_utils.torch_adam import inner_optimizers

    metrics = []
    for rollout_id in range(2):
        if actor.residency is not None:
            actor.sleep()
        trained = actor.train(rollout_id, shard)
        metrics.append({name: value for name, value in trained.items() if name.startswith("train/")})
        if name in ("fp32", "fp32 plain", "bf16"):
            for inner in inner_optimizers(actor.model.state.optimizer):
                inner.state.clear()
    if actor.model.streamed is not None:
        actor.model.streamed.reset_states()
        with actor.model.streamed.materialised():
            for inner in inner_optimizers(actor.model.state.optimizer):
                for state in inner.state.values():
                    assert not any(bool(state[key].any()) for key in ("step", "exp_avg", "exp_avg_sq"))
    return metrics, digest([parameter.detach() for parameter in actor.model.chunks[0].parameters()])


def skipped(actor, shard, masked, cause, fails):
    """Metrics, schedule and digests of all state, at the start and after each rollout."""
    from miles.training.schedule import TrainShard

    step, spoiling = actor.trainer.optimizer_step, False
    bad = shard
    if cause != "gradients" and fails:
        rewards = np.full(len(shard.batch), cause)
        bad = TrainShard(shard.batch.with_columns(rewards=rewards), shard.steps)
    equal = TrainShard(shard.batch.with_columns(rewards=np.zeros(len(shard.batch))), shard.steps)

    def spoiled_step(model, weighs):
        if spoiling and cause == "gradients" and fails:
            named = [item for part in model.state.models for item in part.named_parameters()]
            experts = [parameter for name, parameter in named if ".experts." in name]
            for parameter in experts or [parameter for _, parameter in named]:
                parameter.main_grad.fill_(math.nan)
        return step(model, weighs)

    actor.trainer.optimizer_step = spoiled_step
    result = {"metrics": [], "scheduler": [], "digests": [everything(actor)], "error": None}
    for rollout_id, trained_on in enumerate([masked, shard, bad, shard, masked, equal, bad, masked, bad]):
        spoiling = rollout_id in (2, 6, 8)
        try:
            result["metrics"].append(actor.train(rollout_id, trained_on))
        except FloatingPointError as error:
            result["error"] = str(error)
        result["scheduler"].append(actor.model.state.scheduler.num_steps)
        result["digests"].append(everything(actor))
    return result


def everything(actor):
    """A digest of weights, masters, moments and step counters."""
    import contextlib

    from miles.backends.megatron_utils.torch_adam import inner_optimizers

    with contextlib.nullcontext() if actor.model.streamed is None else actor.model.streamed.materialised():
        tensors = [parameter.detach() for model in actor.model.state.models for parameter in model.parameters()]
        for inner in inner_optimizers(actor.model.state.optimizer):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    tensors.append(parameter.detach())
                    tensors += [value for _, value in sorted(inner.state[parameter].items())]
        return digest(tensors)


def digest(tensors):
    import torch

    values = hashlib.sha256()
    for tensor in tensors:
        values.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return values.hexdigest()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[4:7], Path(sys.argv[7]), json.loads(sys.argv[8]))
