import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles.backends.sglang_utils.server_process import ServerDied, ServerProcess
from miles.backends.sglang_utils.supervisor import LEFT_BEHIND, group_members
from miles.utils.errors import UserError
from miles.utils.network import free_port

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[4]

HEALTHY = """
import http.server, subprocess, sys
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path):
    """Builds a ServerProcess from Python source that gets the port as its argument; ended after the test."""
    servers = []

    def build(source):
        port = free_port()
        command = [sys.executable, "-u", "-c", source, str(port)]
        servers.append(
            ServerProcess(command, dict(os.environ), tmp_path / "server.log", f"http://127.0.0.1:{port}/health")
        )
        return servers[-1]

    yield build
    for process in servers:
        process.terminate()


def test_start_health_and_end_with_its_children(server, tmp_path):
    process = server(HEALTHY)
    process.command += ["--api-key", "hush"]
    process.start()
    process.wait_healthy(20)
    process.check()
    members = [psutil.Process(pid) for pid in group_members(process.pid)]
    assert len(members) == 4  # link, guard, server and its child
    process.terminate()
    assert all(not member.is_running() or member.status() == psutil.STATUS_ZOMBIE for member in members)
    process.terminate()
    with pytest.raises(ServerDied, match="SIGTERM"):
        process.check()
    log = (tmp_path / "server.log").read_text()
    assert log.startswith(sys.executable) and "--api-key '***'\n" in log and "hush" not in log


LEAVES_A_FILE = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.write(bytes(4096)); file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
"""


def test_what_sglang_leaves_in_shared_memory_is_removed(server):
    path = Path(f"{LEFT_BEHIND}of_a_test_{os.getpid()}.shm")
    process = server(LEAVES_A_FILE.replace("sys.argv[1]", repr(str(path))) + HEALTHY)
    process.start()
    process.wait_healthy(20)
    assert path.is_file()
    process.terminate()
    assert not path.exists()


def test_early_death_is_reported_at_once_with_the_tail(server):
    process = server("import sys\nfor i in range(100): print('line', i)\nsys.exit(3)")
    process.start()
    start = time.monotonic()
    with pytest.raises(ServerDied) as caught:
        process.wait_healthy(60)
    assert time.monotonic() - start < 10
    assert "exited with code 3" in str(caught.value)
    assert "line 99" in str(caught.value) and "line 70" in str(caught.value) and "line 69" not in str(caught.value)


def test_wait_is_bounded(server):
    process = server("import time\nprint('still loading')\ntime.sleep(600)")
    process.start()
    with pytest.raises(UserError, match="not healthy within 1 s") as caught:
        process.wait_healthy(1)
    assert "still loading" in str(caught.value)


def test_a_dead_server_leaves_no_children(server):
    process = server(HEALTHY)
    process.start()
    process.wait_healthy(20)
    (guard,) = psutil.Process(process.pid).children()
    (main,) = guard.children()
    main.kill()
    _wait_until_gone(process.pid)
    with pytest.raises(ServerDied, match="ended by SIGKILL"):
        process.check()


def test_ray_kills_children_of_its_workers_first(server):
    process = server(HEALTHY)
    process.start()
    process.wait_healthy(20)
    os.kill(process.pid, signal.SIGKILL)
    _wait_until_gone(process.pid)


@pytest.mark.parametrize("moment", ["starting", "running"])
def test_ends_with_its_parent(tmp_path, moment):
    source = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from miles.backends.sglang_utils.server_process import ServerProcess
port = {free_port()}
url = f"http://127.0.0.1:{{port}}/"
server = ServerProcess([sys.executable, "-u", "-c", {HEALTHY!r}, str(port)], dict(os.environ), Path("log"), url)
server.start()
if {moment == "running"}:
    server.wait_healthy(20)
print(server.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", source], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    group = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _wait_until_gone(group)


def _wait_until_gone(group):
    deadline = time.monotonic() + 10
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(group) == []
