"""The process that runs a program of the model. It locks itself in before it reads one character of that program.

What the kernel then enforces, for the process and all its threads, until its end (miles.rewards.sandbox says the rest):
- Landlock: files can be opened for reading only, and only Python's standard library, shared libraries and time zones.
- seccomp: system calls that are not listed below fail. No sockets, no other processes (fork, exec), no signals, limits
  or tracing of other processes, no files made, removed, renamed or changed in mode.
- Limits on CPU time, address space, open files; files can't grow.
- No capabilities, also where root started it; SIGKILL when its parent ends.

Run as `python -I -S -B -X utf8 sandbox_child.py MODE PROGRAM_FD CPU_SECONDS MEMORY_BYTES`. It writes "ready" and a line
end to stdout once it is locked in, or what was in the way. Then, by MODE, it
- program: runs the program as `python program.py` would;
- solution: imports the program, then answers calls of its functions, a JSON object a line from stdin to stdout;
- tests: runs the program, in which the functions of the solution are calls through stdout and stdin.
"""

import builtins
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import types
from typing import Any

OPEN_FILES = 64

# x86-64 system calls by number.
_ALLOWED = {
    # read, write, close, stat, fstat, lstat, poll, lseek, mmap, mprotect, munmap, brk
    *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
    # rt_sigaction, rt_sigprocmask, rt_sigreturn, pread64, readv, writev, access, pipe, select, sched_yield, mremap
    *(13, 14, 15, 17, 19, 20, 21, 22, 23, 24, 25),
    # madvise, dup, dup2, nanosleep, getitimer, alarm, setitimer, getpid, exit, uname, getcwd, readlink, gettimeofday
    *(28, 32, 33, 35, 36, 37, 38, 39, 60, 63, 79, 89, 96),
    # getrlimit, getrusage, sysinfo, times, getuid, getgid, geteuid, getegid, getppid, sigaltstack, gettid, time, futex
    *(97, 98, 99, 100, 102, 104, 107, 108, 110, 131, 186, 201, 202),
    # sched_getaffinity, getdents64, set_tid_address, restart_syscall, clock_gettime, clock_getres, clock_nanosleep
    *(204, 217, 218, 219, 228, 229, 230),
    # exit_group, epoll_wait, epoll_ctl, openat, newfstatat, readlinkat, faccessat, pselect6, ppoll, set_robust_list
    *(231, 232, 233, 257, 262, 267, 269, 270, 271, 273),
    # epoll_pwait, eventfd2, epoll_create1, dup3, pipe2, getrandom, statx, rseq, close_range, faccessat2
    *(281, 290, 291, 292, 293, 318, 332, 334, 436, 439),
}
_IOCTL, _CLONE, _KILL, _FCNTL, _TGKILL, _OPEN, _PRLIMIT, _CLONE3 = 16, 56, 62, 72, 234, 2, 302, 435
_CLONE_THREAD = 0x10000
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_DUPFD_CLOEXEC

_X86_64 = 0xC000003E
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000

_READ_FILE, _READ_FOLDER, _ALL_FILE_RIGHTS = 4, 4 | 8, 0x1FFF  # of Landlock's first version
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _CAPSET = 444, 445, 446, 126
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38

# As Python has them without its module site, which is not loaded here and would add exit and quit.
_BUILT_INS = frozenset(dir(builtins))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def lock_in(cpu_s: int, memory_bytes: int) -> None:
    """Raise OSError where the kernel refuses a part of it."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or sys.maxsize < 2**32:
        raise OSError(errno.ENOSYS, "only Linux on x86-64 is supported")
    for name, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
    ):
        resource.setrlimit(name, (value, value))
    nothing = struct.pack("<6I", *[0] * 6)
    _system_call("capset", _CAPSET, struct.pack("<Ii", 0x20080522, 0), nothing)
    _prctl("PR_SET_PDEATHSIG", _SET_PDEATHSIG, signal.SIGKILL)
    _prctl("PR_SET_NO_NEW_PRIVS", _SET_NO_NEW_PRIVS, 1)
    _forbid_files()
    _forbid_calls()


def _forbid_files() -> None:
    rules = _system_call("Landlock", _CREATE_RULESET, struct.pack("<Q", _ALL_FILE_RIGHTS), 8, 0)
    folders = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
    files = ("/etc/ld.so.cache", "/dev/null", "/dev/urandom")
    for path in {*folders, *files, *sys.path, os.path.join(sys.base_prefix, "lib")}:
        if os.path.exists(path):
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = _READ_FOLDER if os.path.isdir(path) else _READ_FILE
            _system_call("Landlock", _ADD_RULE, rules, 1, struct.pack("<Qi", rights, file), 0)
            os.close(file)
    _system_call("Landlock", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def _forbid_calls() -> None:
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, 0)]
    for number in sorted({*_ALLOWED, _OPEN}):
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    steps += _where_argument(_CLONE, 0, _ANY_BIT, (_CLONE_THREAD,))
    steps += _where_argument(_FCNTL, 1, _EQUAL, _FCNTL_COMMANDS)
    steps += _where_argument(_KILL, 0, _EQUAL, (os.getpid(),))
    steps += _where_argument(_TGKILL, 0, _EQUAL, (os.getpid(),))
    steps += _where_argument(_PRLIMIT, 0, _EQUAL, (0,))
    # The C library tries another way after ENOSYS; nothing here is a terminal.
    for number, code in ((_CLONE3, errno.ENOSYS), (_IOCTL, errno.ENOTTY)):
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | code)]
    steps += [(_RETURN, 0, 0, _FAIL | errno.EPERM)]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(instructions)))
    _prctl("seccomp", _SET_SECCOMP, 2, ctypes.addressof(program))


def _where_argument(number: int, argument: int, test: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Steps that allow a call where the low half of one argument passes the test with one of the values."""
    inner = [(_LOAD, 0, 0, 16 + 8 * argument)]
    for value in values:
        inner += [(test, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    inner += [(_RETURN, 0, 0, _FAIL | errno.EPERM)]
    return [(_EQUAL, 0, len(inner), number), *inner]


def _system_call(name: str, *arguments: object) -> int:
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc.syscall(*wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(name: str, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:5]]
    if _libc.prctl(*padded) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


# --- values that travel: plain data, never objects with behaviour of their own ---


def encode(value: object) -> object:
    """A value for JSON. Raises TypeError for what is no plain data."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    kind: Any
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in kind.__iter__(value)]}
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    raise TypeError(f"{type(value).__name__} is no plain data")


def decode(value: Any) -> Any:
    """The value that `encode` was given, in the built-in types."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in items}
    if kind == "bytes":
        return bytes.fromhex(items)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item) for item in items)


# --- modes ---


def run_program(source: str) -> None:
    """Run it as the main module."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), module.__dict__)


class Channel:
    """stdin and stdout for JSON lines; whatever else prints or reads gets /dev/null."""

    def __init__(self) -> None:
        self._in, self._out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 0)
        os.dup2(2, 1)

    def send(self, message: object) -> None:
        self._out.write(json.dumps(message).encode() + b"\n")
        self._out.flush()

    def receive(self) -> Any:
        line = self._in.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other side is gone")
        return json.loads(line)


def serve_solution(source: str, channel: Channel) -> None:
    """Name the program's functions, then answer calls until stdin closes."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise  # it has failed; otherwise what it has defined until then counts
    functions = functions_of(module)
    channel.send({"functions": sorted(functions)})
    while True:
        request = channel.receive()
        try:
            arguments, named = decode(request["arguments"]), decode(request["named"])
            answer = {"value": encode(functions[request["call"]](*arguments, **named))}
        except Exception as error:  # the program's own, for the tests to see
            answer = {"raised": type(error).__name__, "text": str(error)[:200]}
        channel.send(answer)


def functions_of(module: types.ModuleType) -> dict:
    """Its functions by name, and the methods of a class Solution, each called on a new instance.

    Names of built-in functions are left out: tests must not ask the solution what `all` is.
    """
    found = {name: value for name, value in vars(module).items() if callable(value) and not isinstance(value, type)}
    solution = vars(module).get("Solution")
    if isinstance(solution, type):
        for name in vars(solution):
            if callable(getattr(solution, name)):
                found.setdefault(name, lambda *a, _name=name, **k: getattr(solution(), _name)(*a, **k))
    return {name: value for name, value in found.items() if not name.startswith("_") and name not in _BUILT_INS}


# The first two would end a loop of the tests over answers, such as all(map(...)), as if it were through.
_NOT_RAISED = (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup)


def run_tests(source: str, channel: Channel) -> None:
    """Run the tests, then their functions test_*; report whether nothing was raised, and how often they called."""
    calls = 0

    def function(name: str):
        def call(*arguments, **named):
            nonlocal calls
            calls += 1
            channel.send({"call": name, "arguments": encode(list(arguments)), "named": encode(named)})
            answer = channel.receive()
            if "raised" not in answer:
                return decode(answer["value"])
            kind = vars(builtins).get(answer["raised"])
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_RAISED):
                raise kind(answer["text"])
            raise RuntimeError(answer["text"])

        call.__name__ = name
        return call

    names = channel.receive()["functions"]
    # As in functions_of, and here again: what the other process says is the model's word.
    functions = {name: function(name) for name in names if not name.startswith("_") and name not in _BUILT_INS}
    solution = types.ModuleType("solution")
    vars(solution).update(functions)
    sys.modules["solution"] = solution
    namespace: dict[str, Any] = {"__name__": "tests", **functions}
    try:
        exec(compile(source, "tests.py", "exec"), namespace)
        own = [name for name, value in namespace.items() if value is not functions.get(name)]
        for name in own:
            if name.startswith("test_"):
                namespace[name]()
        passed = True
    except (Exception, SystemExit):  # whatever it is, the tests did not pass
        passed = False
    channel.send({"passed": passed, "calls": calls})


def main() -> None:
    """See the top of this file."""
    mode, program, cpu_s, memory_bytes = sys.argv[1], *map(int, sys.argv[2:5])
    ready = b"ready\n"
    try:
        lock_in(cpu_s, memory_bytes)
    except (OSError, ValueError) as error:
        ready = f"{error}\n".encode()
    os.write(1, ready)
    if ready != b"ready\n":
        sys.exit(1)
    with open(program, encoding="utf-8") as file:
        source = file.read()
    sys.set_int_max_str_digits(0)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    if mode == "program":
        run_program(source)
    else:
        {"solution": serve_solution, "tests": run_tests}[mode](source, Channel())


if __name__ == "__main__":
    main()
