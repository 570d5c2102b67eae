"""What a hostile program gets done in the sandbox: nothing."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from miles.rewards import sandbox
from miles.rewards.sandbox import Confined, SandboxError, check_sandbox, run_program

SPARE = 1 << 16


@pytest.fixture
def short(monkeypatch):
    """Two seconds of wall time, one of CPU time."""
    monkeypatch.setattr(sandbox, "CPU_S", 1)
    return 2.0


def run(source, stdin="", seconds=20.0):
    return run_program(source, stdin, SPARE, time.monotonic() + seconds)


def refused(*statements, setup="import os, socket, ctypes, resource"):
    """Run each statement; the names of those that raised an OSError or ValueError (a limit)."""
    lines = [setup]
    for number, statement in enumerate(statements):
        lines += [
            "try:",
            f"    {statement}",
            "except (OSError, ValueError) as error:",
            f"    print({number}, flush=True)",
        ]
    return [statements[int(line)] for line in run("\n".join(lines)).split()]


def test_the_sandbox_holds_here():
    check_sandbox()


def test_a_program_reads_its_input_and_prints():
    program = """
import sys, threading, math, json, collections, re, sqlite3, decimal, heapq
sys.setrecursionlimit(1 << 20)
threading.stack_size(1 << 26)
def main():
    for line in sys.stdin:
        print(sum(map(int, line.split())), "ä")
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
    assert run(program, "1 2\n3 4") == "3 ä\n7 ä\n"


@pytest.mark.parametrize("source", ["raise SystemExit(1)", "1 / 0", "def", "import os; os._exit(3)", "\0", "\ud800"])
def test_a_program_that_fails_prints_nothing_that_counts(source):
    assert run("print(1)\n" + source) is None


def test_what_the_system_refuses(tmp_path):
    secret = tmp_path / "labels.jsonl"
    secret.write_text("42")
    forbidden = [
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.create_connection(('127.0.0.1', 80))",
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "os.killpg(0, 9)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
        "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99))",
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "open('/dev/shm/escaped', 'w')",
        f"open({str(tmp_path / 'escaped')!r}, 'w')",
        f"open({str(secret)!r}, 'a')",
        f"open({str(secret)!r})",
        f"os.truncate({str(secret)!r}, 0)",
        f"os.remove({str(secret)!r})",
        f"os.rename({str(secret)!r}, {str(tmp_path / 'escaped')!r})",
        f"os.chmod({str(secret)!r}, 0)",
        f"os.utime({str(secret)!r}, (0, 0))",
        f"os.symlink('/', {str(tmp_path / 'escaped')!r})",
        f"os.mkdir({str(tmp_path / 'escaped')!r})",
        f"os.mkfifo({str(tmp_path / 'escaped')!r})",
        "open('/etc/passwd')",
        "open('/proc/self/environ')",
        "open(f'/proc/{os.getppid()}/mem')",
        "os.listdir('/')",
        "os.listdir('/work')",
        "os.memfd_create('big')",
        "os.setuid(0)",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.sched_setaffinity(os.getppid(), [0])",
        "os.unshare(os.CLONE_NEWUSER)",
        "os.chroot('/tmp')",
    ]
    assert refused(*forbidden) == forbidden
    assert secret.read_text() == "42" and os.listdir(tmp_path) == ["labels.jsonl"]
    assert not os.path.exists("/dev/shm/escaped")


@pytest.mark.parametrize(
    "number", [41, 53, 57, 58, 59, 101, 157, 165, 272, 310, 311, 317, 321, 322, 323, 425, 424, 428, 435, 434, 438]
)
def test_system_calls_by_number(number):
    """Past Python: socket, socketpair, fork, ptrace, prctl, process_vm_writev, bpf, io_uring, clone3, pidfd_open..."""
    program = f"import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.syscall({number}, 0, 0, 0, 0, 0, 0))"
    assert run(program) == "-1\n"


def test_no_environment_no_files_of_ours(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = """
import os
opened = []
for number in range(3, 64):
    try:
        os.fstat(number)
        opened.append(number)
    except OSError:
        pass
print("HF_TOKEN" in os.environ, "PATH" in os.environ, opened)
"""
    assert run(program) == "False False []\n"


def test_an_endless_loop_ends_by_its_cpu_time(short):
    start = time.monotonic()
    assert run("while True: pass") is None
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.sleep(3600)",
        "import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ntime.sleep(3600)",
        "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        "import os\nos.close(1)\nimport time\ntime.sleep(3600)",
    ],
)
def test_a_program_that_waits_for_ever_ends_in_time(source, short):
    start = time.monotonic()
    assert run(source, seconds=short) is None
    assert 1 < time.monotonic() - start < 15


@pytest.mark.parametrize("size", ["'x' * (1 << 33)", "bytearray(1 << 31)", "[0] * (1 << 30)"])
def test_memory_is_bounded(size):
    assert run(f"try:\n    {size}\nexcept MemoryError:\n    print('refused')") == "refused\n"


def test_a_flood_of_output_is_cut():
    start = time.monotonic()
    assert run("while True: print('x' * 100_000)") is None
    assert time.monotonic() - start < 15


def test_a_fork_bomb_has_no_children():
    program = """
import os, subprocess, multiprocessing
failed = 0
for _ in range(100):
    try:
        os.fork()
    except PermissionError:
        failed += 1
try:
    subprocess.run(["true"])
except PermissionError:
    failed += 1
print(failed)
"""
    assert run(program) == "101\n"


def test_a_thread_bomb_is_killed():
    program = """
import threading, time
threading.stack_size(1 << 16)
for _ in range(500):
    threading.Thread(target=time.sleep, args=(5,)).start()
time.sleep(5)
print("all started")
"""
    assert run(program) is None


def test_no_rights_and_nothing_left_when_it_is_closed():
    with Confined("program", "import time; time.sleep(60)", time.monotonic() + 60, subprocess.DEVNULL) as confined:
        pid = confined.process.pid
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert not os.path.exists(f"/proc/{pid}")
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_no_open_file_is_left():
    run("")
    before = os.listdir("/proc/self/fd")
    for source in ("print(1)", "1 / 0", "print('x' * 1_000_000)"):
        run(source)
    assert os.listdir("/proc/self/fd") == before


def test_a_system_without_it_is_an_error_not_a_verdict(monkeypatch, tmp_path):
    broken = tmp_path / "child.py"
    text = sandbox._CHILD.read_text()
    broken.write_text(
        text.replace("_RESTRICT_SELF, _CAPSET = 444, 445, 446, 126", "_RESTRICT_SELF, _CAPSET = 9999, 445, 446, 126")
    )
    assert broken.read_text() != text
    monkeypatch.setattr(sandbox, "_CHILD", broken)
    with pytest.raises(SandboxError, match="Landlock: Function not implemented"):
        run("print(1)")
    with pytest.raises(ValueError, match="sandbox, and that can't be had here .*Landlock: .*needs Linux 5.13"):
        check_sandbox.__wrapped__()


@pytest.mark.parametrize("part", ["_forbid_files()", "_forbid_calls()"])
def test_the_check_notices_a_hole(monkeypatch, tmp_path, part):
    broken = tmp_path / "child.py"
    broken.write_text(sandbox._CHILD.read_text().replace(f"    {part}\n", ""))
    monkeypatch.setattr(sandbox, "_CHILD", broken)
    try:
        with pytest.raises(ValueError, match="does not hold here: it let through"):
            check_sandbox.__wrapped__()
    finally:
        Path("/dev/shm/miles_probe").unlink(missing_ok=True)
