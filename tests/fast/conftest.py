"""Fixtures for every test here."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_ranks(tmp_path):
    """Run a test file's own `__main__` in several processes: `run_ranks(__file__, world_size, *arguments)`.

    Each process is started as `python FILE RANK WORLD_SIZE STORE ARGUMENTS...`, with STORE a file for
    torch.distributed's file:// rendezvous. All must end well within `timeout` seconds.
    """

    def run(file: str, world_size: int, *arguments: str, timeout: float = 120.0) -> None:
        store, deadline = tmp_path / "store", time.monotonic() + timeout
        store.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        logs = [tmp_path / f"rank_{rank}.log" for rank in range(world_size)]
        ranks = [
            subprocess.Popen(
                [sys.executable, file, str(rank), str(world_size), str(store), *arguments],
                env=environment,
                stdout=logs[rank].open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank in range(world_size)
        ]
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            codes = [rank.poll() for rank in ranks]
            for rank in ranks:
                rank.kill()
                rank.wait()
        if codes != [0] * world_size:
            tails = "\n".join(f"--- rank {i}, {codes[i]}\n{logs[i].read_text()[-3000:]}" for i in range(world_size))
            pytest.fail(f"ranks ended with {codes} (None: stopped after {timeout} s or another's failure)\n{tails}")

    return run
