"""`python die_with_parent.py PARENT_PID command...`: become `command`, which the kernel kills when the parent ends.

A program of its own because the setting must be made in the child, and `preexec_fn` is unsafe in a process with threads.
Linux only. The kernel acts when the parent's *thread* that started this process ends.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> None:
    parent_pid, command = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent ended before the setting was made
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
