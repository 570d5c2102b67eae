"""`python supervisor.py PARENT_PID command...`: run `command`, and end all of it when it, or the parent, ends.

A process of its own between Miles and a server. The kernel tells it when the parent is gone, however that came about;
it then ends its whole process group. SGLang's workers watch their own parent only once they have been imported, and
would outlive a server that is killed while it starts. Linux only.

The kernel speaks when the parent's *thread* that started this process ends: start it from a thread that stays.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

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
    """Leads a process group of its own. Ends as the command ended: with its exit code, or by its signal."""
    parent_pid, command = int(argv[0]), argv[1:]
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent ended before the kernel was told
        return
    server = subprocess.Popen(command)
    while server.poll() is None and not stop:
        time.sleep(POLL_SECONDS)
    code = _end(server)
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _end(server: subprocess.Popen) -> int:
    """End the server, let its helpers clean up, and kill what is left of the group; returns the server's code."""
    if server.poll() is None:
        os.killpg(os.getpgrp(), signal.SIGTERM)
        try:
            server.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
    code = server.wait()
    deadline = time.monotonic() + CLEAN_UP_SECONDS
    while others := [pid for pid in group_members(os.getpgrp()) if pid != os.getpid()]:
        if time.monotonic() > deadline:
            for pid in others:
                _kill(pid)
        time.sleep(POLL_SECONDS)
    return code


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # ended in the meantime


if __name__ == "__main__":
    main(sys.argv[1:])
