"""Tokens a second and MFU of training steps on one GPU, against the rate of a large matrix product in the same run.

    python benchmarks/train_step.py [--sizes 0.6B 1.7B 4B] [--tokens 8192 16384] [--json PATH] [-- FLAGS of train.py]

Each case is a model with random weights in bf16 under Megatron's distributed optimizer, in a process of its own: a
Qwen3 of that many parameters, or a slice of a model with experts (benchmarks/slices.py): 30B-A3B, DeepSeek-V3 and
DeepSeek-V4, gpt-oss. It takes steps as a run does: one micro-batch of packed samples of 2,048 tokens (256 of them the
prompt), the policy loss, gradients, Adam. The time is the median step's, the first ones left out.

MFU counts what a step must compute and nothing that is recomputed: 6 operations a weight and token (output weights:
response tokens only), and 6 s^2 a layer, query head and channel for causal attention over a sample of s tokens. It is
given as a share of what the best of some large matrix products reaches on this card, and of its data sheet (989).

What follows `--` are flags of train.py, for example --transformer-impl transformer_engine, or
--recompute-granularity full --recompute-method block --recompute-num-layers 6; without --recompute-granularity the 4B
model recomputes some layers at 16,384 tokens, and the slices of DeepSeek all, whose activations don't fit otherwise.
`--profile` prints where the time of one step goes: kernels by their share of the device's time, then when and for how
long the device was idle. `--device cpu --sizes tiny tiny-30B-A3B --tokens 256` tries the script without a GPU.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import ROOT, Row, parser, report
from slices import MODELS, write_config

sys.path.insert(0, str(ROOT))

LENGTH, PROMPT = 2048, 256
TINY_LENGTH, TINY_PROMPT = 64, 16
DATA_SHEET = 989e12
# Rows, depth and columns of the products that the card's rate is taken of.
PRODUCTS = [(8192, 8192, 8192), (16384, 8192, 8192), (16384, 4096, 16384), (16384, 2560, 19456)]
# What a step needs beside 18 bytes a parameter is most of the memory there.
RECOMPUTE = {
    ("4B", 16384): "--recompute-granularity full --recompute-method block --recompute-num-layers 6",
    ("DeepSeek-V4", 16384): "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ("DeepSeek-V3", 16384): "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def sample_lengths(size: str) -> tuple[int, int]:
    """Tokens of a sample, and of its prompt."""
    return (TINY_LENGTH, TINY_PROMPT) if size.startswith("tiny") else (LENGTH, PROMPT)


def step_flops(size: str, tokens: int) -> float:
    """Floating-point operations that a step must do, forward and backward."""
    from miles.hf.flops import checkpoint_flops

    length, prompt = sample_lengths(size)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), size)
        forward = checkpoint_flops(folder).of(np.array([length]), np.array([length - prompt])).item()
    return 3 * forward * (tokens // length)


def trainer_case(size: str, tokens: int, device: str, steps: int, warmup: int, profile: bool, flags: list[str]) -> dict:
    """Seconds of each step, the loss and the peak of the device's memory."""
    import torch

    from miles.backends.megatron_utils.initialize import initialize
    from miles.backends.megatron_utils.trained_model import MegatronModel
    from miles.backends.trainer.shard_trainer import ShardTrainer, policy_loss
    from miles.hf.config import load_hf_config
    from miles.training.batch import TrainRows
    from miles.training.rollout_columns import trained_columns
    from miles.training.schedule import plan_for, shard
    from miles.utils.arguments import parse_args
    from miles.utils.network import free_ports
    from miles.utils.types import Sample

    length, prompt = sample_lengths(size)
    samples = tokens // length
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), size)
        prompts = Path(name) / "prompts.jsonl"
        prompts.write_text('{"input": "unused", "label": "unused"}\n')
        base = f"--device {device} --bf16 --actor-num-gpus-per-node 1 --colocate --no-offload-train"
        base += " --no-offload-rollout --rm-type exact --label-key label --num-rollout 1"
        batch = f"--rollout-batch-size {samples // 2} --n-samples-per-prompt 2 --micro-batch-size {samples}"
        batch += f" --rollout-max-response-len {length - prompt}"
        files = ["--hf-checkpoint", name, "--prompt-data", str(prompts)]
        config = parse_args([*base.split(), *batch.split(), *files, *flags])
        hf_config = load_hf_config(name)
    initialize(config, 0, 1, f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}")
    torch.manual_seed(0)
    trained = MegatronModel(config, hf_config)
    (model,) = trained.chunks
    for parameter in model.parameters():
        # Norms at 1, so that activations have the size that they have in a real model.
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    for name, table in model.named_buffers():
        if name.endswith("expert_of_token"):
            # Zeros send every token to one expert.
            table.copy_(torch.rand(len(table), hf_config.n_routed_experts).topk(table.shape[1]).indices)
    trained.build_optimizer(config, 1000)

    draw = torch.randint(0, hf_config.vocab_size, (samples, length)).tolist()
    rollout = [
        Sample(
            group_index=index // 2,
            index=index,
            tokens=draw[index],
            response_length=length - prompt,
            reward=0.0,
            rollout_log_probs=[-12.0] * (length - prompt),
            status=Sample.Status.COMPLETED,
        )
        for index in range(samples)
    ]
    table = TrainRows.from_samples(rollout, [1.0, -1.0] * (samples // 2))
    mine = shard(table, plan_for(config, table), 0)
    trainer = ShardTrainer(trained, policy_loss(trained))
    columns = {"old_log_probs": torch.full((samples * (length - prompt),), -12.0)}
    columns |= trained_columns(config, mine.batch, columns, lambda _: None)

    def step() -> dict[str, float]:
        (metrics,) = trainer.train(mine, columns)
        if device == "cuda":
            torch.cuda.synchronize()
        return metrics

    seconds = []
    for _ in range(warmup + steps):
        started = time.perf_counter()
        metrics = step()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    if profile:
        print_profile(step, device)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": seconds[warmup:],
        "warmup_seconds": seconds[:warmup],
        "loss": metrics["train/loss"],
        "peak": peak,
    }


def print_profile(step: Callable[[], object], device: str) -> None:
    """What takes the time of one step: operators, then on a GPU its kernels, and how long it had none."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profiler:
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=70))
    on_device = [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    kernels: dict[str, list[float]] = {}
    for event in on_device:
        kernels.setdefault(event.name, []).append(event.device_time / 1e6)
    busy = sum(map(sum, kernels.values()))
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:45]:
        print(f"{sum(times):9.5f} s {sum(times) / max(busy, 1e-9):6.1%} {len(times):6d} times  {name[:110]}")
    on_device.sort(key=lambda event: event.time_range.start)
    gaps = [
        (after.time_range.start - before.time_range.end, before.name, after.name)
        for before, after in itertools.pairwise(on_device)
    ]
    for gap, before, after in sorted(gaps, reverse=True)[:15]:
        print(f"idle {gap / 1e6:.5f} s between {before[:60]} and {after[:60]}")
    print(f"step {seconds:.4f} s (profiled), kernels {busy:.4f} s, idle {max(seconds - busy, 0.0):.4f} s")


def rate_case(device: str) -> dict:
    """Operations a second of large products in bf16: of the best shape, the median of many after a warm-up."""
    import torch

    rates = []
    for shape in PRODUCTS if device == "cuda" else [(512, 512, 512)]:
        a = torch.randn(shape[0], shape[1], dtype=torch.bfloat16, device=device)
        b = torch.randn(shape[2], shape[1], dtype=torch.bfloat16, device=device)
        seconds = []
        for _ in range(60):
            started = time.perf_counter()
            for _ in range(5):
                a @ b.t()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append((time.perf_counter() - started) / 5)
        rates.append(2 * shape[0] * shape[1] * shape[2] / statistics.median(seconds[20:]))
    return {"flops": max(rates)}


def child(case: str, *arguments: object) -> dict | None:
    """The result of a case in a process of its own, which has the GPU to itself; None if it failed."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, __file__, "--case", json.dumps([case, *arguments]), "--result", result.name]
        if subprocess.run(command, check=False).returncode:
            return None
        return json.load(result)


def row_of(size: str, tokens: int, flags: list[str], result: dict | None, rate: float) -> Row:
    names = ("step s", "tokens/s", "TFLOP/s", "MFU", "of 989", "peak GB")
    row = {"size": size, "tokens": tokens, **dict.fromkeys(names), "flags": " ".join(flags) or "-"}
    if result is None:
        return row
    seconds = statistics.median(result["seconds"])
    flops = step_flops(size, tokens) / seconds
    values = (
        seconds,
        round(tokens / seconds),
        flops / 1e12,
        flops / rate,
        flops / DATA_SHEET,
        result["peak"] and result["peak"] / 1e9,
    )
    return row | dict(zip(names, values, strict=True))


def main() -> None:
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    cli = parser(__doc__)
    cli.add_argument("--sizes", nargs="+", choices=MODELS, default=["0.6B", "1.7B", "4B"], help="models")
    cli.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384], help="tokens of a step's micro-batch")
    cli.add_argument("--steps", type=int, default=8, help="steps that are timed (default 8)")
    cli.add_argument("--warmup", type=int, default=4, help="steps before them (default 4)")
    cli.add_argument("--profile", action="store_true", help="print where the time of one more step goes")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script")
    cli.add_argument("--case", help=argparse.SUPPRESS)
    cli.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = cli.parse_args(own)
    if options.case:
        case, *arguments = json.loads(options.case)
        options.result.write_text(json.dumps(globals()[f"{case}_case"](*arguments)))
        return

    for size in options.sizes:
        for tokens in options.tokens:
            if tokens % (2 * sample_lengths(size)[0]):
                cli.error(f"--tokens {tokens} is no pairs of samples of {sample_lengths(size)[0]} tokens")
    rate = child("rate", options.device)["flops"]
    rows, notes = [], {}
    for size in options.sizes:
        for tokens in options.tokens:
            extra = [] if "--recompute-granularity" in flags else RECOMPUTE.get((size, tokens), "").split()
            arguments = (size, tokens, options.device, options.steps, options.warmup, options.profile)
            result = child("trainer", *arguments, [*flags, *extra])
            rows.append(row_of(size, tokens, [*flags, *extra], result, rate))
            if result is not None:
                notes[f"{size} parameters"] = result["parameters"]
                notes[f"{size} at {tokens}, first step s"] = result["warmup_seconds"][0]
    notes |= {"bf16 TFLOP/s of a product": rate / 1e12, "tokens of a sample": LENGTH, "of its prompt": PROMPT}
    report("Training steps on one GPU", rows, notes, options.json)


if __name__ == "__main__":
    main()
