"""Weights from a trainer into an SGLang engine on the same GPU: seconds and GB/s, against a plain copy on the device.

    python benchmarks/weight_sync.py [--sizes 0.6B 4B 8B] [--buffer-mb 512 1024 2048] [--updates 5] [--json PATH]

Each size is a Qwen3 of that many parameters in bf16 with random weights: Megatron's model in one process, a real SGLang
server on the same GPU in others. An update is everything from the pause to the continue, as `train.py` does it with
--colocate --no-offload. The columns:

- first, s: the first update, in which kernels are loaded; median: of the later ones;
- of copy: its GB/s as a share of those of one device-to-device copy of as many bytes, measured beside it;
- session, wait: of these, seconds to pause and continue the engine, and to wait for it to take the buckets;
- gather: seconds to make all buckets with no engine; all but the first are made while the engine takes the last;
- extra, reserved: most device memory that the trainer's process took for it, in tensors and from the driver; two
  buckets are allowed.

At the end each engine's weights are overwritten, sent once more and compared (--check-weight-update-equal); the notes
say how that went. `--device cpu --sizes tiny` tries the script without a GPU, over shared memory.
"""

import argparse
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Row, parser, report
from sleep_wake import SIZES, write_checkpoint_config

sys.path.insert(0, str(ROOT))

# What an engine takes of the GPU; the rest is the trainer's model and the two sides of the copy.
ENGINE_SHARE = 0.3
GPU_SERVER = (
    "--sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-cuda-graph-backend-decode disabled"
)


def write_checkpoint(folder: Path, size: str) -> None:
    """A checkpoint whose headers are real and whose weights are a hole in the file: engines start with others."""
    from transformers import GenerationConfig

    from miles.backends.megatron_utils.families import family_for
    from miles.hf.config import load_hf_config
    from miles.tools.make_tiny_checkpoint import byte_tokenizer

    write_checkpoint_config(folder, size)
    byte_tokenizer().save_pretrained(folder)
    GenerationConfig().save_pretrained(folder)
    config = load_hf_config(folder)
    header, end = {}, 0
    for entry in family_for(config).entries(config, range(config.num_hidden_layers), True, True):
        for name, shape in zip(entry.hf_names, entry.shapes, strict=True):
            begin = end
            end += 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def run_config(folder: Path, device: str):
    """The configuration of a run with one trainer rank and one engine."""
    from miles.utils.arguments import parse_args

    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "unused"}\n')
    base = f"--device {device} --bf16 --actor-num-gpus-per-node 1 --colocate --no-offload --rm-type exact"
    batch = "--label-key label --rollout-max-response-len 16 --rollout-batch-size 4 --n-samples-per-prompt 4"
    engine = f"--num-rollout 1 --sglang-load-format dummy --sglang-mem-fraction-static {ENGINE_SHARE}"
    files = ["--hf-checkpoint", str(folder), "--prompt-data", str(prompts), "--run-dir", str(folder / "run")]
    extra = GPU_SERVER.split() if device == "cuda" else []
    return parse_args([*base.split(), *batch.split(), *engine.split(), *extra, *files])


def trainer_case(folder: str, device: str, url: str, buffers: list[int], updates: int) -> dict:
    """Build the model and update the engine at `url`; seconds and bytes for each size of a bucket."""
    import torch
    import torch.distributed as dist

    from miles.backends.megatron_utils.families import family_for
    from miles.backends.megatron_utils.initialize import initialize
    from miles.backends.megatron_utils.model import build_model, parallel_info
    from miles.backends.megatron_utils.weight_source import MegatronWeights
    from miles.backends.trainer.world import timeout
    from miles.hf.checkpoint import CheckpointIndex
    from miles.hf.config import load_hf_config
    from miles.utils.agreement import Agreement
    from miles.utils.network import free_ports
    from miles.weight_sync.target import EngineTarget
    from miles.weight_sync.updater import SyncSettings, TrainerRank, WeightUpdater

    def updater(buffer_size: int, check: bool) -> WeightUpdater:
        parallel = parallel_info(chunks[0].config)
        source = MegatronWeights(chunks, family_for(hf_config), hf_config, parallel, CheckpointIndex(folder))
        settings = SyncSettings(
            checkpoint_folder=folder,
            buffer_size=buffer_size,
            flush_cache=True,
            pause_mode=config.pause_generation_mode,
            transfer_mode=config.update_weight_transfer_mode,
            disk_folder=None,
            check_equal=check,
        )
        trainer = TrainerRank(0, Agreement(group), "127.0.0.1", timeout(config))
        return WeightUpdater(source, [EngineTarget(url, 1, [0])], trainer, settings)

    config, hf_config = run_config(Path(folder), device), load_hf_config(folder)
    initialize(config, 0, 1, f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}")
    chunks, group = build_model(config, hf_config), dist.new_group(backend="gloo")
    torch.manual_seed(0)
    for parameter in chunks[0].parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    cases = []
    for buffer_size in buffers:
        sender, seconds, parts = updater(buffer_size, check=False), [], []
        with Memory(device) as memory:
            for version in range(1, updates + 2):
                metrics = sender.update(version)
                seconds.append(metrics["perf/update_weights_time"])
                parts.append([metrics[f"perf/update_weights_{part}_time"] for part in ("session", "wait")])
        gather = min(gather_alone(sender) for _ in range(2))
        copy = min(plain_copy(int(metrics["perf/update_weights_bytes"]), device) for _ in range(3))
        case = {"seconds": seconds, "bytes": metrics["perf/update_weights_bytes"], "gather": gather, "copy": copy}
        case |= {"parts": [statistics.median(values) for values in zip(*parts[1:], strict=True)]}
        case |= {"tensors": metrics["perf/update_weights_tensors"], "buckets": len(sender.gatherer.buckets)}
        cases.append(case | {"buffer": buffer_size, "allocated": memory.allocated, "reserved": memory.reserved})
    logging.basicConfig(level=logging.WARNING)
    logger = logging.getLogger("miles.weight_sync.check")
    said: list[str] = []
    logger.addFilter(lambda record: said.append(record.getMessage()) or False)
    logger.setLevel(logging.INFO)
    try:
        updater(buffers[0], check=True).update(updates + 2)
    except RuntimeError as error:
        said.append(str(error))
    return {"cases": cases, "check": "; ".join(said)}


class Memory:
    """The most device memory that this process takes within it, beyond what it had; None on a CPU."""

    def __init__(self, device: str):
        self.on_gpu = device == "cuda"
        self.allocated: int | None = None
        self.reserved: int | None = None

    def __enter__(self) -> "Memory":
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        if self.on_gpu:
            self.allocated = torch.cuda.max_memory_allocated() - self._before[0]
            self.reserved = torch.cuda.max_memory_reserved() - self._before[1]


def gather_alone(sender) -> float:
    """Seconds to make every bucket, one after the other."""
    import torch

    gatherer = sender.gatherer
    synchronize = torch.cuda.synchronize if gatherer.source.device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    for bucket in gatherer.buckets:
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=gatherer.source.device)
        gatherer.fill(bucket, flat, everywhere=True)
        del flat
    synchronize()
    return time.perf_counter() - started


def plain_copy(nbytes: int, device: str) -> float:
    """Seconds of one copy of as many bytes on the device, warm."""
    import torch

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    synchronize()
    started = time.perf_counter()
    target.copy_(source)
    synchronize()
    return time.perf_counter() - started


def child(*arguments: object) -> dict:
    """The result of `trainer_case` in a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, __file__, "--case", json.dumps(arguments), "--result", result.name]
        environment = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1")
        subprocess.run(command, check=True, env=environment)
        return json.load(result)


def with_engine(size: str, device: str, buffers: list[int], updates: int) -> dict:
    """Start an engine, run `trainer_case` beside it, end it."""
    from miles.backends.sglang_utils.engine import SGLangEngine

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, size)
        engine = SGLangEngine(run_config(folder, device), 0, [0] if device == "cuda" else [])
        started = time.monotonic()
        try:
            url = engine.start()
            print(f"{size}: the engine is up after {time.monotonic() - started:.0f} s", flush=True)
            return child(name, device, url, buffers, updates)
        finally:
            engine.shutdown()


def row_of(size: str, case: dict) -> Row:
    first, *later = case["seconds"]
    median, size_gb = statistics.median(later), case["bytes"] / 1e9
    gb = {name: None if case[name] is None else case[name] / 1e9 for name in ("allocated", "reserved")}
    return {
        "what": f"{size}, {case['buffer'] // 2**20} MiB",
        "GB": size_gb,
        "buckets": case["buckets"],
        "first s": first,
        "median s": median,
        "GB/s": size_gb / median,
        "of copy": case["copy"] / median,
        "session s": case["parts"][0],
        "wait s": case["parts"][1],
        "gather s": case["gather"],
        "extra GB": gb["allocated"],
        "reserved GB": gb["reserved"],
    }


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6B", "4B", "8B"], help="models that are sent")
    cli.add_argument("--buffer-mb", nargs="+", type=int, default=[512, 1024, 2048], help="MiB of a bucket")
    cli.add_argument("--updates", type=int, default=5, help="updates after the first, of each (default 5)")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script")
    cli.add_argument("--case", help=argparse.SUPPRESS)
    cli.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = cli.parse_args()
    if options.case:
        options.result.write_text(json.dumps(trainer_case(*json.loads(options.case))))
        os._exit(0)  # ends the process groups' threads too
    rows, notes = [], {}
    for size in options.sizes:
        result = with_engine(size, options.device, [mb * 2**20 for mb in options.buffer_mb], options.updates)
        rows += [row_of(size, case) for case in result["cases"]]
        last = result["cases"][-1]
        notes |= {f"{size} tensors": last["tensors"], f"{size} plain copy GB/s": last["bytes"] / last["copy"] / 1e9}
        notes[f"{size} check"] = result["check"]
    report("Weights from one trainer rank into one engine", rows, notes, options.json)


if __name__ == "__main__":
    main()
