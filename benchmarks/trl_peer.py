"""Samples/s of Miles and of TRL's GRPOTrainer (transformers' generation, no vLLM) on one task, by phase, in one run.

    python benchmarks/trl_peer.py --model SMOLLM2 [--steps 12] [--json PATH]           # one GPU
    python benchmarks/trl_peer.py --config scripts/demo/grpo.yaml --task reverse       # a CPU, a tiny random model

Miles runs train.py with the YAML file, without its evaluations; then TRL runs alone, each variant in a process of its
own, with the same model, prompts in the same order, reward, group size, lengths, batch, optimizer and clipping
(trl_loop.py). The first steps are left out, the median of the others is shown. Needs `pip install trl==1.16.0`.

TRL's variants on a GPU: float32 weights under bfloat16 autocast, as it loads a model by default, and bfloat16 weights
with bfloat16 Adam, which is faster and rounds small updates away (Miles keeps float32 masters).
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, Row, parser, report

from miles.config import RunConfig
from miles.tools.make_prompts import TASKS, make_prompts
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.tracking.report import read_metrics
from miles.utils.arguments import parse_args

VARIANTS = {
    "cpu": {"TRL": {}},
    "gpu": {"TRL": {}, "TRL bf16 weights": {"model_init_kwargs": {"dtype": "bfloat16"}}},
}
# How the metrics of Miles and the parts of a TRL rollout answer each other; None: there is no such phase.
PHASES = {
    "generate": ("perf/rollout_time", "generate"),
    "old log-probabilities": ("perf/log_probs_time", "score"),
    "optimizer steps": ("perf/actor_train_time", "train"),
    "weight sync": ("perf/update_weights_time", None),
}


def write_config(source: Path, folder: Path, model: Path | None, task: str, changes: dict[str, Any]) -> Path:
    """The YAML file without its evaluations, with prompts of its own and, without `model`, a tiny random one."""
    if model is None:
        model = folder / "model"
        make_tiny_checkpoint(model)
    make_prompts(task, 4000, folder / "prompts.jsonl", seed=2)
    settings = yaml.safe_load(source.read_text())
    settings = {name: value for name, value in settings.items() if "eval" not in name}
    settings |= {
        "hf_checkpoint": str(model),
        "prompt_data": str(folder / "prompts.jsonl"),
        "run_dir": str(folder / "run"),
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings | changes))
    return path


def run_miles(config_file: Path, run_dir: str) -> list[dict[str, float]]:
    """The metrics of each step of train.py."""
    subprocess.run([sys.executable, str(ROOT / "train.py"), "--config", str(config_file)], check=True)
    return read_metrics(Path(run_dir) / "metrics.jsonl")


def run_trl(config_file: Path, rollouts: int, settings: dict[str, Any], threads: int | None) -> list[dict[str, float]]:
    """Seconds by phase of each rollout of TRL on the same settings, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seconds.json"
        command = [sys.executable, str(Path(__file__).with_name("trl_loop.py")), "--config", str(config_file)]
        command += ["--rollouts", str(rollouts), "--output", str(output), "--trl", json.dumps(settings)]
        if threads is not None:
            command += ["--threads", str(threads)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
        return json.loads(output.read_text())


def median(steps: list[dict[str, float]], name: str) -> float:
    """Of one number over steps."""
    return statistics.median(step[name] for step in steps)


def table(config: RunConfig, miles: list[dict[str, float]], peers: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Seconds a step by phase, and samples/s, of Miles and its peers; how many times as long each peer takes."""
    rows: list[Row] = []

    def add(name: str, ours: float, theirs: dict[str, float | None]) -> None:
        row: Row = {"phase": name, "Miles": ours}
        for peer, value in theirs.items():
            row |= {peer: value, f"{peer} / Miles": None if value is None else value / ours}
        rows.append(row)

    for name, (metric, part) in PHASES.items():
        add(name, median(miles, metric), {p: median(s, part) if part else None for p, s in peers.items()})
    total = median(miles, "perf/step_time")
    add("other", total - sum(row["Miles"] for row in rows), dict.fromkeys(peers))
    totals = {peer: median(steps, "step") for peer, steps in peers.items()}
    add("step", total, totals)
    samples = config.samples_per_rollout
    add("samples/s", samples / total, {peer: samples / value for peer, value in totals.items()})
    tokens = statistics.mean(step["rollout/response_len/mean"] for step in miles)
    add(
        "response tokens a sample",
        tokens,
        {peer: statistics.mean(s["tokens"] for s in steps) / samples for peer, steps in peers.items()},
    )
    return rows


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--model", type=Path, help="Hugging Face checkpoint (default: a tiny random one)")
    command.add_argument("--config", type=Path, default=ROOT / "scripts/gpu/smollm2_addition.yaml", help="YAML file")
    command.add_argument("--task", choices=sorted(TASKS), default="addition", help="the prompts (default addition)")
    command.add_argument("--steps", type=int, default=12, help="rollouts of each side (default 12)")
    command.add_argument("--warmup", type=int, default=2, help="rollouts left out at the start (default 2)")
    command.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="flags to change, for both sides")
    command.add_argument("--trl", type=json.loads, default={}, metavar="JSON", help="fields of GRPOConfig to change")
    options = command.parse_args()
    if not 0 <= options.warmup < options.steps:
        command.error(f"--warmup {options.warmup} of --steps {options.steps}: at least one step must be left")
    with tempfile.TemporaryDirectory() as folder:
        changes = {"num_rollout": options.steps} | options.set
        config_file = write_config(options.config, Path(folder), options.model, options.task, changes)
        config = parse_args(["--config", str(config_file)])
        miles = run_miles(config_file, config.run_dir)[options.warmup :]
        peers = {}
        for name, settings in VARIANTS["cpu" if config.device == "cpu" else "gpu"].items():
            peers[name] = run_trl(config_file, options.steps, settings | options.trl, None)[options.warmup :]
    notes = {
        "steps": len(miles),
        "samples a step": config.samples_per_rollout,
        "optimizer steps a step": config.steps_per_rollout,
        "most response tokens": config.rollout_max_response_len,
        "trl": importlib.metadata.version("trl"),
    }
    title = f"GRPO with Miles and with TRL on {'a CPU' if config.device == 'cpu' else 'one GPU'}: seconds a step"
    report(title, table(config, miles, peers), notes, options.json)


if __name__ == "__main__":
    main()
