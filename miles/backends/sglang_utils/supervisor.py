"""`python supervisor.py PARENT_PID command...`: run `command`, and end all of it when it, or the parent, ends.

SGLang's workers watch their own parent only once they have been imported, and would outlive a server that is killed
while it starts. So a process of ours, the guard, starts the server and ends its whole process group. Between the guard
and Miles stands another, the link: Ray kills the children of a worker that it ends, but not their children. Whoever
dies, the kernel tells the next: Miles -> link -> guard -> the group. Linux only.

The kernel speaks when the parent's *thread* that started the link ends: start it from a thread that stays.
"""

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil

# SGLang leaves one such file behind for each server that does not end by itself.
LEFT_BEHIND = "/dev/shm/sglang_loads_"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_SECONDS = 0.1
# Short, because SGLang, told to end, drains its requests for many seconds; nothing of it is worth saving.
GRACE_SECONDS = 1.0
# For Python's resource tracker, which unlinks the semaphores of a killed server and then ends by itself.
CLEAN_UP_SECONDS = 2.0


def group_members(group_id: int) -> list[int]:
    """Ids of the living processes of a process group (a zombie is not living: it holds nothing)."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group_id and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def main(argv: list[str]) -> None:
    """The link. Leads the process group and ends as the command ended: with its exit code, or by its signal."""
    parent_pid, command = int(argv[0]), argv[1:]
    _hear_of_the_end_of(parent_pid)
    link_pid = os.getpid()
    guard_pid = os.fork()
    if guard_pid == 0:
        _guard(link_pid, command)
    code = os.waitstatus_to_exitcode(os.waitpid(guard_pid, 0)[1])
    _exit_like(code)


def _guard(link_pid: int, command: list[str]) -> None:
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    _hear_of_the_end_of(link_pid)
    server = subprocess.Popen(command)
    while server.poll() is None and not stop:
        time.sleep(POLL_SECONDS)
    code = _end(server, spare={os.getpid(), link_pid})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _exit_like(code)


def _hear_of_the_end_of(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent ends; exit if it has ended before."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)


def _exit_like(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _end(server: subprocess.Popen, spare: set[int]) -> int:
    """End the server, let its helpers clean up, kill the rest of the group but `spare`; returns the server's code.

    Files that it leaves behind in shared memory are removed, if a process of the group still has them open by now.
    """
    left_behind = set().union(*map(_left_behind, group_members(os.getpgrp())))
    if server.poll() is None:
        os.killpg(os.getpgrp(), signal.SIGTERM)
        try:
            server.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
    code = server.wait()
    deadline = time.monotonic() + CLEAN_UP_SECONDS
    while others := set(group_members(os.getpgrp())) - spare:
        if time.monotonic() > deadline:
            for pid in others:
                _kill(pid)
        time.sleep(POLL_SECONDS)
    for path in left_behind:
        pathlib.Path(path).unlink(missing_ok=True)
    return code


def _left_behind(pid: int) -> set[str]:
    """Files of LEFT_BEHIND that a process has mapped."""
    try:
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()  # ended in the meantime
    return {line.split()[-1] for line in maps.splitlines() if LEFT_BEHIND in line and not line.endswith("(deleted)")}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # ended in the meantime


if __name__ == "__main__":
    main(sys.argv[1:])
