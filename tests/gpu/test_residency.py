"""Sleep and wake on a real GPU: the same losses to the last bit, and memory that really leaves.

Each training run is a process of its own, since torch_memory_saver ends a process that frees its memory at exit.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROGRAM = Path(__file__).parents[2] / "scripts" / "loss_trace.py"
DISK = ("--offload-train-disk-dir", "DISK", "--offload-train-disk-chunk-mb", "16")
SLEEPS = {
    "host": (),
    "host, given back": ("--no-offload-train-keep-host-buffers",),
    "disk": ("--offload-train-target", "disk", *DISK),
    "rematerialised": ("--rematerialize-param-from-master-weight",),
    "streamed": ("--stream-optimizer-state-to-disk", *DISK),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_tiny_checkpoint(folder, hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64)
    return folder


def trace(checkpoint: Path, *arguments: str) -> str:
    """What scripts/loss_trace.py prints for three rollouts on a GPU."""
    command = [sys.executable, str(PROGRAM), "--checkpoint", str(checkpoint), "--device", "cuda", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def losses(printed: str) -> list[str]:
    """The lines of losses and gradient norms, in hexadecimal."""
    return [line for line in printed.splitlines() if "loss" in line]


@pytest.fixture(scope="module")
def awake(checkpoint):
    lines = losses(trace(checkpoint))
    assert len(lines) == 3
    return lines


@pytest.mark.parametrize("name", SLEEPS)
def test_sleeping_changes_no_bit(name, checkpoint, awake, tmp_path):
    flags = [str(tmp_path) if flag == "DISK" else flag for flag in SLEEPS[name]]
    printed = trace(checkpoint, "--sleep", "--", *flags)
    assert losses(printed) == awake
    residual = [float(value) for value in re.findall(r"gpu_residual_tensors_gb (\S+)", printed)]
    assert len(residual) == 3
    assert max(residual) < 0.2
