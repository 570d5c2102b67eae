"""Trains a tiny random model on a fixed made-up rollout and prints each step's loss and gradient norm, to the last bit.

    python scripts/loss_trace.py --checkpoint DIR                                     # one process
    python scripts/loss_trace.py --checkpoint DIR --ranks 2 -- --tensor-model-parallel-size 2 --sequence-parallel
    python scripts/loss_trace.py --checkpoint DIR --sleep -- --bf16 --rematerialize-param-from-master-weight

Run it before and after a refactor: the output must not change by a bit, and neither by --sleep, with which the trainer
sleeps and wakes before each rollout, every tensor hashed. Between layouts it agrees to rounding. What follows `--` are
flags of train.py. The rollout has prompts and responses of uneven lengths, masks with holes, rewards of both signs and
a group of equal rewards, which count as normalised already, and a teacher's log-probabilities; with
--advantage-estimator ppo values are made up, too, and no critic is trained.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

from miles.config import RunConfig
from miles.config.residency import policy_of
from miles.ray.resume import resumed
from miles.residency.plan import leaves_after_sync
from miles.training.batch import TrainRows
from miles.training.schedule import TrainShard, plan_for, shard
from miles.utils.arguments import parse_args
from miles.utils.errors import ends_in_a_sentence
from miles.utils.network import free_ports
from miles.utils.types import Sample

NUM_SAMPLES, GROUP = 16, 4
DEFAULTS = {
    "--rollout-max-response-len": "16",
    "--global-batch-size": str(NUM_SAMPLES // 2),
    "--lr": "0.001",
    "--max-logprob-abs-diff": "100",
    "--data-pad-size-multiplier": "4",
}
# What is printed of a sleep and a wake.
MOVES = [
    *(f"perf/{name}" for name in ("sleep_time", "destroy_process_groups_time", "sleep_bytes", "wake_up_time")),
    *(f"perf/{name}" for name in ("reload_process_groups_time", "wake_up_bytes")),
    *("perf/gpu_residual_tensors_gb", "perf/gpu_residual_cache_gb", "perf/cpu_memory_after_offload_train_gb"),
]


def made_up_rollout(vocab_size: int, seed: int = 0) -> TrainRows:
    """16 samples in groups of four, with log-probabilities that an engine and a teacher might have given."""
    draw, teacher = random.Random(seed), random.Random(seed + 1)
    samples, rewards = [], []
    for index in range(NUM_SAMPLES):
        prompt, response = draw.randint(1, 9), draw.randint(1, 12)
        mask = [int(draw.random() < 0.8) for _ in range(response)]
        mask[-1] = 1
        samples.append(
            Sample(
                group_index=index // GROUP,
                index=index,
                tokens=[draw.randrange(vocab_size) for _ in range(prompt + response)],
                response_length=response,
                reward=0.0,
                loss_mask=mask,
                rollout_log_probs=[-draw.random() * 6 for _ in range(response)],
                teacher_log_probs=[-teacher.random() * 6 for _ in range(response)],
                status=Sample.Status.COMPLETED,
            )
        )
        rewards.append(0.0 if index < GROUP else draw.uniform(-1.5, 1.5))
    return TrainRows.from_samples(samples, rewards)


def made_up_shard(config: RunConfig, vocab_size: int, dp_rank: int, masked: bool = False) -> TrainShard:
    """One data-parallel rank's share of the made-up rollout; `masked`: with every response token masked."""
    batch = made_up_rollout(vocab_size)
    if masked:
        batch = batch.with_columns(loss_masks=[mask * 0 for mask in batch["loss_masks"]])
    return shard(batch, plan_for(config, batch), dp_rank)


def made_up_values(mine: TrainShard) -> torch.Tensor:
    """What a critic might give for each response token: float32, flat, the same for a token in every layout."""
    return torch.from_numpy(mine.batch["rollout_log_probs"]) * 0.1


def trace(rank: int, ranks: int, config: RunConfig, steps: int, port: int, result: Path) -> None:
    """One rank: trains on the made-up rollout `steps` times; the reporting rank writes the trace."""
    if config.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    from miles.backends.megatron_utils.actor import MegatronTrainRayActor

    torch.set_num_threads(1)
    actor = MegatronTrainRayActor(config, rank, ranks)
    actor.init(f"127.0.0.1:{port}")
    mine = made_up_shard(config, actor.model.hf_config.vocab_size, actor.model.grid.dp_rank)
    values = [made_up_values(mine)] if config.use_critic and actor.model.grid.is_last_stage else []
    lines = []
    for rollout_id in range(steps):
        # Without a weight sync, what stays for one leaves too.
        left = leaves_after_sync(actor.party, policy_of(config))
        moved = actor.sleep() | actor.move(left) | actor.wake_up() if config.offload_train else {}
        metrics = actor.train(rollout_id, mine, *values)
        trained = {name: value for name, value in metrics.items() if name.startswith(("train/", "rollout/"))}
        lines.append(trained | moved if trained else {})
    if lines[0]:
        result.write_text(json.dumps(lines))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def trace_config(
    checkpoint: str,
    ranks: int,
    steps: int,
    flags: list[str],
    folder: Path,
    device: str = "cpu",
    sleep: bool = False,
) -> RunConfig:
    """The configuration of `steps` made-up rollouts of two optimizer steps each; `folder` gets a file it asks for.

    A checkpoint of --load is looked for now.

    `flags` replace the `DEFAULTS` that they name.
    """
    given = {flag.partition("=")[0] for flag in flags}
    defaults = [part for flag, value in DEFAULTS.items() if flag not in given for part in (flag, value)]
    offload = ("--offload-train", "--check-residency") if sleep else ("--no-offload-train",)
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "unused", "label": "unused"}\n')
    config = parse_args(
        [
            *("--device", device, "--actor-num-gpus-per-node", str(ranks), "--colocate"),
            *(*offload, "--no-offload-rollout", "--hf-checkpoint", checkpoint),
            *("--prompt-data", str(prompts), "--label-key", "label", "--rm-type", "exact"),
            *("--num-rollout", str(steps), "--rollout-batch-size", str(NUM_SAMPLES // GROUP)),
            *("--n-samples-per-prompt", str(GROUP), "--run-dir", str(folder)),
            *defaults,
            *flags,
        ]
    )
    return resumed(config)


def run(checkpoint: str, ranks: int, steps: int, flags: list[str], device: str, sleep: bool) -> list[dict[str, float]]:
    """The metrics of each rollout under `ranks` processes and train.py's `flags`."""
    with tempfile.TemporaryDirectory() as folder:
        config = trace_config(checkpoint, ranks, steps, flags, Path(folder), device, sleep)
        result = Path(folder) / "trace.json"
        port = free_ports(1, "127.0.0.1")[0]
        multiprocessing.spawn(trace, args=(ranks, config, steps, port, result), nprocs=ranks)
        return json.loads(result.read_text())


def main() -> None:
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--checkpoint", required=True, help="a tiny checkpoint (python -m miles.tools.make_tiny_checkpoint)"
    )
    parser.add_argument("--ranks", type=int, default=1, help="trainer processes (default 1)")
    parser.add_argument("--steps", type=int, default=3, help="rollouts of two optimizer steps each (default 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU a process")
    parser.add_argument("--sleep", action="store_true", help="sleep and wake before each rollout")
    arguments = parser.parse_args(own)
    trace = run(arguments.checkpoint, arguments.ranks, arguments.steps, flags, arguments.device, arguments.sleep)
    for step, metrics in enumerate(trace):
        loss, norm = metrics["train/loss"], metrics["train/grad_norm"]
        print(f"{step}  loss {loss.hex()} ({loss:.9f})  grad_norm {norm.hex()} ({norm:.9f})")
        if arguments.sleep:
            moves = "  ".join(f"{name.removeprefix('perf/')} {metrics[name]:.3g}" for name in MOVES if name in metrics)
            print(f"   {moves}")


if __name__ == "__main__":
    with ends_in_a_sentence():
        main()
