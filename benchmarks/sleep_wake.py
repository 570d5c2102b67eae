"""Sleep and wake of a whole trainer rank on one GPU: bytes and GB/s, against the limits of the machine in the same run.

    python benchmarks/sleep_wake.py [--sizes 0.6B 7B] [--disk-sizes 0.6B] [--cycles 3] [--json PATH]

Each size is a Qwen3 of that many parameters with random weights, under Megatron's distributed optimizer in bf16, which
has taken a training step (--no-step: none, for a size that leaves no room for one). The rows:

- host: the trainer as it sleeps by default. First cycle and the median of the later ones;
- rematerialise: weights are rebuilt from the masters instead of copied;
- disk: --offload-train-target disk, against O_DIRECT reads and writes of the same bytes and chunk by one thread;
- as it comes: torch_memory_saver with its own host copy of as many bytes;
- pinned copy: one cudaMemcpy of 8 GB to pinned memory and back, the limit.

GB/s count the bytes that were copied, in the time of the memory's moves alone; `whole verb` is all that is waited for.
Process groups come and go on several GPUs only: `scripts/loss_trace.py --device cuda --ranks 2 --sleep` times them.
`--device cpu --sizes tiny` tries the script without a GPU.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT, Row, parser, report

sys.path.insert(0, str(ROOT))

# hidden size, layers, intermediate size, heads, key-value heads, vocabulary, tied embeddings
SIZES = {
    "tiny": (64, 2, 128, 4, 2, 1024, True),
    "0.6B": (1024, 28, 3072, 16, 8, 151936, True),
    "1.7B": (2048, 28, 6144, 16, 8, 151936, True),
    "4B": (2560, 36, 9728, 32, 8, 151936, True),
    "7B": (4096, 30, 12288, 32, 8, 151936, False),
    "8B": (4096, 36, 12288, 32, 8, 151936, False),
}
LINK_BYTES = 8 * 2**30


def write_checkpoint_config(folder: Path, size: str) -> None:
    """config.json of a Qwen3 of this size; there are no weights."""
    hidden, layers, intermediate, heads, kv_heads, vocabulary, tied = SIZES[size]
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "intermediate_size": intermediate,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": hidden // heads if size == "tiny" else 128,
                "vocab_size": vocabulary,
                "tie_word_embeddings": tied,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1000000,
                "max_position_embeddings": 4096,
                "hidden_act": "silu",
                "attention_bias": False,
                "torch_dtype": "bfloat16",
            }
        )
    )


def trainer_case(size: str, device: str, cycles: int, flags: list[str], with_step: bool) -> dict:
    """Build the trainer, take a step, and let it sleep and wake; seconds and bytes of each cycle."""
    import torch
    import torch.distributed as dist

    from miles.backends.megatron_utils.initialize import initialize
    from miles.backends.megatron_utils.trained_model import MegatronModel
    from miles.backends.trainer.residency import build_residency
    from miles.backends.trainer.shard_trainer import ShardTrainer, policy_loss
    from miles.backends.trainer.world import timeout
    from miles.hf.config import load_hf_config
    from miles.residency.plan import Party, Region
    from miles.training.rollout_columns import trained_columns
    from miles.utils.agreement import Agreement
    from miles.utils.arguments import parse_args
    from miles.utils.network import free_ports
    from scripts.loss_trace import made_up_shard

    def step() -> float:
        trainer = ShardTrainer(trained, policy_loss(trained))
        shard = made_up_shard(config, hf_config.vocab_size, trained.grid.dp_rank)
        columns = {"old_log_probs": trainer.log_probs(shard)}
        columns |= trained_columns(config, shard.batch, columns, lambda _: None)
        return trainer.train(shard, columns)[-1]["train/loss"]

    with tempfile.TemporaryDirectory() as name:
        write_checkpoint_config(Path(name), size)
        prompts = Path(name) / "prompts.jsonl"
        prompts.write_text('{"input": "unused"}\n')
        base = f"--device {device} --bf16 --actor-num-gpus-per-node 1 --colocate --rm-type exact --label-key label"
        batch = "--rollout-max-response-len 16 --rollout-batch-size 4 --n-samples-per-prompt 4 --num-rollout 1"
        files = ["--hf-checkpoint", name, "--prompt-data", str(prompts)]
        config = parse_args([*base.split(), *batch.split(), *files, *flags])
        hf_config = load_hf_config(name)
    initialize(config, 0, 1, f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}")
    trained = MegatronModel(config, hf_config)
    (model,) = trained.chunks
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    trained.build_optimizer(config, 100)
    agreement = Agreement(dist.new_group(backend="gloo", timeout=timeout(config)))
    trained.begin(agreement)
    residency = build_residency(config, 0, trained, Party.ACTOR)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if with_step:
        step()
    runs, before = [], residency.hash_everything()
    for _ in range(cycles):
        run = residency.sleep()
        run["sleep_memory"] = sum(m.seconds for m in residency.moved if m.move.region is not Region.COMM)
        free, total = torch.cuda.mem_get_info() if device == "cuda" else (0, 0)
        run |= residency.wake_up() | {"used_asleep": total - free}
        run["wake_up_memory"] = sum(m.seconds for m in residency.moved if m.move.region is not Region.COMM)
        runs.append(run)
    assert residency.hash_everything() == before, "a tensor has changed"
    return {"parameters": parameters, "loss": step() if with_step else None, "cycles": runs}


def saver_case(nbytes: int) -> dict:
    """torch_memory_saver's own pause and resume of `nbytes`, with its host copy, second cycle."""
    import torch
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"
    with torch_memory_saver.region(tag="all", enable_cpu_backup=True):
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    tensor.zero_()
    times = {}
    for verb in ("pause", "resume"):
        torch.cuda.synchronize()
        started = time.perf_counter()
        getattr(torch_memory_saver, verb)("all")
        torch.cuda.synchronize()
        times[verb] = time.perf_counter() - started
    return times


def link_case() -> dict:
    """GB/s of a plain copy to pinned memory and back, best of three."""
    import torch

    device = torch.zeros(LINK_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    seconds = {"out": [], "in": []}
    for _ in range(3):
        for way, (target, source) in {"out": (host, device), "in": (device, host)}.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds[way].append(time.perf_counter() - started)
    return {way: LINK_BYTES / min(values) / 1e9 for way, values in seconds.items()}


def disk_case(nbytes: int, chunk: int) -> dict:
    """GB/s of plain O_DIRECT writes (over a file that is there, as from the second sleep on) and reads."""
    buffer = mmap.mmap(-1, chunk)
    buffer.write(os.urandom(2**20) * (chunk // 2**20))
    offsets = range(0, nbytes - chunk + 1, chunk)
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        file = os.open(f"{folder}/raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        rates = {}
        for way, transfer in (("out", os.pwritev), ("out", os.pwritev), ("in", os.preadv)):
            started = time.perf_counter()
            with ThreadPoolExecutor(1) as thread:
                assert all(n == chunk for n in thread.map(lambda at: transfer(file, [buffer], at), offsets))  # noqa: B023
            rates[way] = len(offsets) * chunk / (time.perf_counter() - started) / 1e9
        os.close(file)
    return rates


def child(case: str, *arguments: object) -> dict:
    """The result of a case in a process of its own, which has the GPU to itself."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, __file__, "--case", json.dumps([case, *arguments]), "--result", result.name]
        subprocess.run(command, check=True)
        return json.load(result)


def rows_of(label: str, result: dict, limit: dict | None) -> list[Row]:
    """Sleep and wake of the first cycle, and the median of the later ones."""
    rows = []
    for name, cycles in ((f"{label}, first", result["cycles"][:1]), (label, result["cycles"][1:])):
        for verb, way in (("sleep", "out"), ("wake_up", "in")):
            seconds = statistics.median(cycle[f"{verb}_memory"] for cycle in cycles)
            copied = cycles[0][f"perf/{verb}_bytes"]
            rows.append(
                {
                    "what": f"{name}: {verb}",
                    "s": seconds,
                    "GB/s": copied / seconds / 1e9,
                    "of limit": copied / seconds / 1e9 / limit[way] if limit else None,
                    "B/parameter": copied / result["parameters"],
                    "whole verb s": statistics.median(cycle[f"perf/{verb}_time"] for cycle in cycles),
                    "host GB": max(cycle["perf/cpu_memory_after_offload_train_gb"] for cycle in cycles),
                    "GPU GB asleep": max(cycle["used_asleep"] for cycle in cycles) / 1e9,
                }
            )
    return rows


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6B", "7B"], help="models that sleep on the host")
    cli.add_argument("--disk-sizes", nargs="*", choices=SIZES, default=["0.6B"], help="models that sleep on disk")
    cli.add_argument("--no-step", nargs="*", choices=SIZES, default=["7B"], help="models that take no training step")
    cli.add_argument("--cycles", type=int, default=4, help="sleeps and wakes of each (default 4)")
    cli.add_argument("--disk-dir", default=str(Path.home()), help="where the disk rows write (default: home)")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script")
    cli.add_argument("--case", help=argparse.SUPPRESS)
    cli.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = cli.parse_args()
    if options.case:
        case, *arguments = json.loads(options.case)
        options.result.write_text(json.dumps(globals()[f"{case}_case"](*arguments)))
        os._exit(0)  # torch_memory_saver complains, with exit code 1, about memory that is freed at exit

    on_gpu = options.device == "cuda"
    link = child("link") if on_gpu else None
    rows, notes = [], {}
    if link:
        notes = {"pinned copy out GB/s": link["out"], "pinned copy in GB/s": link["in"]}
    for size in options.sizes:
        with_step = size not in options.no_step
        for label, flags in (("host", []), ("rematerialise", ["--rematerialize-param-from-master-weight"])):
            result = child("trainer", size, options.device, options.cycles, flags, with_step)
            rows += rows_of(f"{size} {label}", result, link)
            notes[f"{size} parameters"] = result["parameters"]
        if on_gpu:
            nbytes = 14 * result["parameters"]
            times = child("saver", nbytes)
            notes |= {f"{size} as it comes, {verb} GB/s": nbytes / seconds / 1e9 for verb, seconds in times.items()}
            notes |= {f"{size} as it comes, {verb} s": seconds for verb, seconds in times.items()}
    for size in options.disk_sizes:
        flags = ["--offload-train-target", "disk", "--offload-train-disk-dir", options.disk_dir]
        result = child("trainer", size, options.device, options.cycles, flags, size not in options.no_step)
        raw = child("disk", 14 * result["parameters"], 256 * 2**20) if on_gpu else None
        rows += rows_of(f"{size} disk", result, raw)
        if raw:
            notes |= {f"{size} raw disk write GB/s": raw["out"], f"{size} raw disk read GB/s": raw["in"]}
    report("Sleep and wake of one trainer rank", rows, notes, options.json)


if __name__ == "__main__":
    main()
