"""Programs of the model, each in a process that the kernel holds: see miles.rewards.sandbox_child for how.

Guaranteed, with or without root, by the kernel:
- no network: no socket can be made, not even to this machine;
- no other processes; no signal, trace or changed limit of another; no new rights;
- no file written, made, removed or renamed, anywhere; only Python's standard library, the shared libraries in
  /lib, /usr/lib and the like, and time zones can be read: no prompt file, checkpoint, home folder, /proc;
- no environment variables, and no open files of ours;
- CPU_S seconds of CPU time and MEMORY_BYTES of address space a process; nothing lives on when our process ends.
By a thread of ours that looks every 50 ms, so approximately: WALL_S seconds in all, and THREADS threads a process.
By the reader of its output: the bytes that we take before it is killed.

Not guaranteed: that names, sizes and times of files stay unknown (stat is allowed); what several processes take of the
machine together (a pool bounds their number); hidden channels, such as the load of a processor; protection from faults
of the kernel. Needs Linux 5.13 or later with Landlock and seccomp, on x86-64; with less, it is refused.
"""

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from miles.utils.errors import UserError

CPU_S = 10
WALL_S = 60.0
MEMORY_BYTES = 1 << 30
THREADS = 64
# A program that prints this much more than it should is killed, whatever it would print next.
SPARE_OUTPUT = 1 << 16

_WATCH_S = 0.05
_CHILD = Path(__file__).with_name("sandbox_child.py")
_READY = b"ready\n"

_PROBE = """
import ctypes, os, signal, socket, threading

def refused(name, call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return
    print(name, flush=True)

refused("network", socket.socket)
refused("fork", os.fork)
refused("exec", os.execv, "/bin/true", ["true"])
refused("signal", os.kill, os.getppid(), 0)
refused("write", open, "/dev/shm/miles_probe", "w")
refused("make a folder", os.mkdir, "/tmp/miles_probe")
refused("read", open, "/proc/self/status")
refused("list", os.listdir, "/")
thread = threading.Thread(target=print, args=("done",))
thread.start()
thread.join()
"""


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is said about the program."""


class Confined:
    """One Python process in the sandbox; leaving the context kills it.

    Args:
        mode: program, solution or tests; see miles.rewards.sandbox_child.
        source: the Python program.
        deadline: time.monotonic() at which it is killed.
        stdin: an open file, or subprocess.PIPE for JSON lines.

    Raises:
        SandboxError: it can't be locked in.
    """

    def __init__(self, mode: str, source: str, deadline: float, stdin: int) -> None:
        program = memory_file(source)
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_CHILD), mode, str(program), str(CPU_S)]
        try:
            self.process = subprocess.Popen(
                [*command, str(MEMORY_BYTES)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(program,),
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(program)
        self._deadline = deadline
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._kill_in_time, name="sandbox-watch", daemon=True)
        self._watch.start()
        ready = self.output.readline(1000)
        if ready != _READY:
            self.close()
            said = ready.decode(errors="replace").strip()
            raise SandboxError(said or f"the process ended with status {self.process.returncode} while it started")

    @property
    def output(self) -> IO[bytes]:
        """Its stdout."""
        assert self.process.stdout is not None, "opened as a pipe"
        return self.process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill it, and wait for its end."""
        self.process.kill()
        self.process.wait()
        self._ended.set()
        self._watch.join()
        self.output.close()
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass  # what it never read

    def _kill_in_time(self) -> None:
        while not self._ended.wait(_WATCH_S):
            if time.monotonic() > self._deadline or _threads(self.process.pid) > THREADS:
                self.process.kill()


def memory_file(text: str) -> int:
    """A file without a name that holds the text, open at its start."""
    file = os.memfd_create("miles", os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as writer:
        writer.write(text.encode(errors="surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def run_program(source: str, stdin: str, most_output: int, deadline: float) -> str | None:
    """What a program prints; None if it fails, runs too long, or prints more than `most_output` bytes.

    Raises:
        SandboxError: it can't be locked in.
    """
    stdin_file = memory_file(stdin)
    try:
        with Confined("program", source, deadline, stdin_file) as confined:
            output = confined.output.read(most_output + 1)
            if len(output) > most_output or confined.process.wait() != 0:
                return None
    finally:
        os.close(stdin_file)
    return output.decode(errors="replace")


@functools.cache
def check_sandbox() -> None:
    """Try it out: raise ValueError unless it starts here and refuses what it must."""
    try:
        leaks = run_program(_PROBE, "", SPARE_OUTPUT, time.monotonic() + WALL_S)
    except SandboxError as error:
        raise UserError(
            f"this reward runs what the model wrote in a sandbox, and that can't be had here ({error}); it needs "
            "Linux 5.13 or later on x86-64, with Landlock and seccomp"
        ) from error
    if leaks != "done\n":
        raise UserError(f"the sandbox of the rewards does not hold here: it let through {leaks!r}")


def _threads(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended
    return int(status.rpartition(")")[2].split()[17])
