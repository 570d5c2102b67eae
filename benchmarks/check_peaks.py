"""What `train.py --check` counts, beside what one GPU holds: training steps, and whole runs with an engine.

    python benchmarks/check_peaks.py [--steps 0.6B:16384 ...] [--runs 0.6B:cpu ...] [--folder FOLDER] [--json PATH]

A step is that of train_step.py, in a process of its own; what is measured is the highest sum of torch's blocks. A run
is train.py for three rollouts of a random Qwen3, colocated with its engine, for each way of sharing the GPU: both peak
devices, rematerialised, and asleep on disk. While it runs, what the driver says is in use is read ten times a second;
the host's memory is the trainer's after its last sleep. Each row has the ledger of the same flags beside it.
`--device cpu --steps tiny:256 --runs` tries the steps without a GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from common import ROOT, Row, parser, report
from sleep_wake import SIZES
from slices import write_config
from train_step import child, sample_lengths

sys.path.insert(0, str(ROOT))

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
STEPS = ["0.6B:16384", "4B:8192", "4B:16384", "7B:4096", "30B-A3B:8192", "DeepSeek-V3:4096"]
# What does not fit beside 18 bytes a parameter.
STEP_FLAGS = {
    "4B:16384": "--recompute-granularity full --recompute-method block --recompute-num-layers 6",
    "7B:4096": FULL,
}
RUNS = ["0.6B:cpu", "0.6B:gpu", "0.6B:disk", "4B:cpu", "4B:gpu", "4B:rematerialised"]
# Of sizes whose optimizer one GPU does not hold; name such a run where there are so many: 8B:cpu.
GPUS = {"7B": 2, "8B": 2}
WAYS = {
    "cpu": "",
    "gpu": "--colocate-memory-peak-device gpu",
    "rematerialised": "--rematerialize-param-from-master-weight",
    "disk": "--offload-train-target disk --offload-train-disk-dir {folder}",
}
RUN = (
    "--actor-num-gpus-per-node {gpus} --num-gpus-per-node {gpus} --colocate --apply-chat-template --label-key label "
    "--rm-type math --num-rollout 3 --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-prompt-len 256 "
    "--rollout-max-response-len 1024 --use-dynamic-batch-size --max-tokens-per-gpu 8192"
)


def step_flags(size: str, tokens: int, extra: str) -> list[str]:
    """What train_step.py trains with, for the ledger."""
    length, prompt = sample_lengths(size)
    samples = tokens // length
    flags = "--bf16 --actor-num-gpus-per-node 1 --colocate --no-offload-train --no-offload-rollout --rm-type exact "
    flags += f"--label-key label --num-rollout 1 --rollout-batch-size {samples // 2} --n-samples-per-prompt 2 "
    flags += (
        f"--micro-batch-size {samples} --rollout-max-prompt-len {prompt} --rollout-max-response-len {length - prompt}"
    )
    return [*flags.split(), *extra.split()]


def counted_case(folder: str, flags: list[str]) -> dict[str, float]:
    """The ledger of a model in `folder` on a GPU of 150 GB: its trainer's step, its highest moment, its host asleep."""
    from miles.check.contents import Item
    from miles.check.hardware import HARDWARE
    from miles.check.ledger import TRAINER_PROCESS, ledger_of
    from miles.check.walk import Column
    from miles.utils.arguments import resolve

    prompts = Path(folder) / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text('{"input": "unused", "label": "unused"}\n')
    config = resolve(["--hf-checkpoint", folder, "--prompt-data", str(prompts), *flags]).config
    ledger = ledger_of(config, HARDWARE["H200"])
    (device,) = ledger.devices
    trainer = (Item.WEIGHTS, Item.GRADIENTS, Item.MASTERS, Item.MOMENTS, Item.ACTIVATIONS, Item.LOGITS)
    staging = ledger.host.memory.get("staging for the disk", {}).get(Column.GENERATE, 0.0)
    return {
        "step": sum(device.walk.gpu[Column.TRAIN].get(item, 0.0) for item in trainer),
        "peak": device.peak,
        "host": TRAINER_PROCESS + device.walk.pinned[Column.GENERATE] + staging,
    }


def counted(folder: Path, flags: list[str]) -> dict[str, float]:
    """`counted_case` in a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        case = json.dumps([str(folder), flags])
        subprocess.run([sys.executable, __file__, "--case", case, "--result", result.name], check=True)
        return json.load(result)


def step_row(name: str, device: str) -> Row:
    size, tokens = name.split(":")
    extra = STEP_FLAGS.get(name, "")
    result = child("trainer", size, int(tokens), device, 3, 2, False, extra.split())
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), size)
        expected = counted(Path(folder), step_flags(size, int(tokens), extra))["step"]
    return row(f"{name} step", result and result["peak"], expected)


def row(what: str, measured: float | None, expected: float) -> Row:
    ratio = expected / measured if measured else None
    return {"what": what, "measured GB": measured and measured / 1e9, "counted GB": expected / 1e9, "ratio": ratio}


class Watch:
    """Reads what the driver says of the GPUs' memory while it is entered; `peak` is the most of any, in bytes."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _read(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._end.wait(0.1):
            used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            self.peak = max(self.peak, *(float(line) * 2**20 for line in used.split()))


def run_rows(name: str, folder: Path) -> list[Row]:
    """train.py with a random model that is made once in `folder`."""
    from miles.tools.make_prompts import make_prompts
    from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint

    size, way = name.split(":")
    model, run = folder / size, folder / name.replace(":", "-")
    if not (model / "config.json").exists():
        hidden, layers, inner, heads, groups, vocabulary, tied = SIZES[size]
        sizes: dict[str, Any] = dict(hidden_size=hidden, num_layers=layers, intermediate_size=inner, head_dim=128)
        sizes |= dict(num_heads=heads, num_kv_heads=groups, vocab_size=vocabulary, tie=tied, dtype="bfloat16")
        make_tiny_checkpoint(model, family="qwen3", **sizes)
        make_prompts("addition", 200, model / "prompts.jsonl")
    gpus = GPUS.get(size, 1)
    flags = [*RUN.format(gpus=gpus).split(), *WAYS[way].format(folder=folder).split()]
    expected = counted(model, flags)
    given = ["--hf-checkpoint", str(model), "--prompt-data", str(model / "prompts.jsonl"), "--run-dir", str(run)]
    with Watch() as watch:
        subprocess.run([sys.executable, str(ROOT / "train.py"), *given, *flags], check=True, cwd=ROOT)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    host = last["perf/cpu_memory_after_offload_train_gb"] * 1e9
    return [
        row(f"{name} run, GPU", watch.peak, expected["peak"]),
        row(f"{name} run, host of the trainer", host, gpus * expected["host"]),
    ]


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--steps", nargs="*", default=STEPS, help="MODEL:TOKENS of train_step.py")
    cli.add_argument("--runs", nargs="*", default=RUNS, help=f"MODEL:WAY, a way being {', '.join(WAYS)}")
    cli.add_argument("--folder", type=Path, help="where runs put models, logs and files (default: a temporary one)")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the steps")
    cli.add_argument("--case", help=argparse.SUPPRESS)
    cli.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = cli.parse_args()
    if options.case:
        options.result.write_text(json.dumps(counted_case(*json.loads(options.case))))
        return
    rows = [step_row(name, options.device) for name in options.steps]
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.runs:
            rows += run_rows(name, options.folder or Path(temporary))
    report("What --check counts, and what a GPU holds", rows, {}, options.json)


if __name__ == "__main__":
    main()
