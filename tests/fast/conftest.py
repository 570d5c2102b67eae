"""Fixtures for every test here."""

import functools
import gc
import multiprocessing
import os
import sys
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from xdist.scheduler import LoadFileScheduling

from miles.utils import network

ROOT = Path(__file__).parents[2]
# How often Python looks for garbage, in tests and ranks.
THRESHOLDS = gc.get_threshold()
# Imported once, in a server that ranks are forked from: a rank otherwise spends six seconds on them.
PRELOADED = ["tests.fast.rank_imports"]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONSAFEPATH": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


# A test draws ports long before its ranks open the last of them. So each worker has ports to itself, beside those that
# programs under test draw from (network.PORTS), and below those of outgoing connections.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = range(30000, 32768)[WORKER % 2 :: 2]
_draw = network.free_ports


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """As `miles.utils.network.free_ports`, from this worker's ports."""
    with mock.patch.object(network, "PORTS", PORTS):
        return _draw(count, host)


network.free_ports = free_ports

# Fixtures that start processes; a file that names one that is shared goes to the worker with the others that do.
SHARED = ("engine_server", "local_ray")
STARTS_PROCESSES = {*SHARED, "forkserver", "run_ranks"}
# Minutes each, and by themselves: each test begins as early as it can, in any worker.
RUNS = ("tests/fast/test_train.py", "tests/fast/test_schedules.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes as `real`, and put it first: what is left to the end is short, for any worker."""
    for item in items:
        if STARTS_PROCESSES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.real)
    real = {item.path for item in items if item.get_closest_marker("real")}
    runs = [ROOT / file for file in RUNS]
    items.sort(key=lambda item: (item.path not in runs, item.path not in real))


def pytest_collection() -> None:
    """A tenth of it would go into looking for garbage among all modules."""
    gc.set_threshold(100_000, 50, 1000)


def pytest_collection_finish() -> None:
    """Tests that ask what is left of something have Python's settings again."""
    gc.set_threshold(*THRESHOLDS)


class ByServer(LoadFileScheduling):
    """A file's tests run in one of xdist's workers, and so do all files that share a server; but see RUNS."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in RUNS:
            return nodeid
        return next((name for name in SHARED if name in _text(file)), file)


@functools.cache
def _text(file: str) -> str:
    return (ROOT / file).read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer:
    """See `ByServer`; in the order of the collection."""
    config.option.loadscopereorder = False
    return ByServer(config, log)


@pytest.fixture(scope="session")
def forkserver():
    """A multiprocessing context whose processes come with the trainer's modules imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture(scope="session")
def start_ranks(forkserver):
    """`start_ranks(folder, file, world_size, *arguments)`: what `run_ranks` does, with its logs in a folder."""

    def start(folder: Path, file: str, world_size: int, *arguments: str, timeout: float = 400.0) -> None:
        store, deadline = folder / "store", time.monotonic() + timeout
        store.unlink(missing_ok=True)
        logs = [folder / f"rank_{rank}.log" for rank in range(world_size)]
        commands = [[file, str(rank), str(world_size), str(store), *arguments] for rank in range(world_size)]
        ranks = [
            forkserver.Process(target=run_rank, args=(command, log))
            for command, log in zip(commands, logs, strict=True)
        ]
        for rank in ranks:
            rank.start()
        try:
            while waiting := [rank.sentinel for rank in ranks if rank.exitcode is None]:
                left = deadline - time.monotonic()
                if any(rank.exitcode for rank in ranks) or not connection.wait(waiting, left):
                    break
        finally:
            codes = [rank.exitcode for rank in ranks]
            for rank in ranks:
                rank.kill()
                rank.join()
        if codes != [0] * world_size:
            tails = "\n".join(f"--- rank {i}, {codes[i]}\n{logs[i].read_text()[-3000:]}" for i in range(world_size))
            pytest.fail(f"ranks ended with {codes} (None: stopped after {timeout} s or another's failure)\n{tails}")

    return start


@pytest.fixture
def run_ranks(tmp_path, start_ranks):
    """Run a test file's own `__main__` in several processes: `run_ranks(__file__, world_size, *arguments)`.

    Each process runs it as `python FILE RANK WORLD_SIZE STORE ARGUMENTS...` would, with STORE a file for
    torch.distributed's file:// rendezvous. All must end well within `timeout` seconds.
    """
    return functools.partial(start_ranks, tmp_path)


def run_rank(command: list[str], log: Path) -> None:
    """In a forked process: what `python` does with `command`, its output in `log`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = command
    # As runpy would, but that a process which a rank starts does not import the file, and with it the trainer, anew.
    exec(compile(Path(command[0]).read_text(), command[0], "exec"), {"__name__": "__main__", "__file__": command[0]})
