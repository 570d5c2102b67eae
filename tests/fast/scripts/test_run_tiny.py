"""scripts/run_tiny.py from nothing to a run that was resumed and interrupted: what every script does, but downloads."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from miles.utils.errors import INTERRUPTED
from miles.utils.network import free_ports

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[3]


def test_it_prepares_trains_resumes_and_ends_by_ctrl_c(tmp_path):
    ports = free_ports(2)
    options = ["--run-id", "it", "--ray-port", str(ports[0]), "--dashboard-port", str(ports[1])]
    for name in ("model", "data", "output"):
        options += [f"--{name}-dir", str(tmp_path / name)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "scripts/run_tiny.py", *arguments, *options]
        # A group of its own, as a terminal's foreground has: Ctrl-C reaches all of it.
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    first = start()
    output, _ = first.communicate()
    assert first.returncode == 0, output
    assert "step 2/2" in output
    assert (tmp_path / "model/tiny-qwen3/model.safetensors").is_file() and (tmp_path / "data/addition").is_dir()

    second = start("full-train", "--extra-args", "--num-rollout 1000")
    lines = []
    for line in second.stdout:
        lines.append(line)
        if "step 4/1000" in line:
            os.killpg(second.pid, signal.SIGINT)
            break
    output = "".join(lines) + second.communicate()[0]
    assert second.returncode == INTERRUPTED, output
    assert f"# checkpoint {tmp_path}/model/tiny-qwen3: there" in output
    assert "step 3/1000" in output and "step 1/1000" not in output

    steps = [json.loads(line) for line in (tmp_path / "output/it/metrics.jsonl").read_text().splitlines()]
    assert len(steps) >= 4
    for port in ports:  # the cluster is gone
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5).close()
