r"""`--rm-type code`: whether the response's Python program passes the tests in the label.

The program is the last block between ``` marks behind the last </think>, or all of the text where there is none.

The label is a JSON object, of one of three kinds:
- {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}: the program is run once for each input on stdin, must end with
  status 0, and must print the output; white space at line ends and empty lines at the end aside.
- {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}: each list of arguments must give the output; a tuple
  counts as a list.
- {"tests": "assert add(1, 2) == 3"}: Python code that calls functions of the program by name, or by `from solution
  import add`, and raises unless all is right; its functions test_* are called too. It can use them only with plain data
  (None, bool, int, float, str, bytes, list, tuple, set, dict), which travels by copy.
A function may also be a method of a class Solution.

Every test counts: 1.0 for all, else 0.0. Expected outputs and tests are never in the process that runs the program, so
that it can't read them, end the tests early, or return an object that equals anything. Standard library only.
"""

import ast
import functools
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.rewards.answers import after_thinking
from miles.rewards.reward import Reward, label_of
from miles.rewards.sandbox import SPARE_OUTPUT, WALL_S, Confined, SandboxError, check_sandbox, run_program
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

LONGEST_MESSAGE = 1 << 20  # bytes of one call, or of its answer
MOST_CALLS = 100_000

_FENCE = re.compile(r"^[ \t]*+`{3,}+[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
_KINDS = '{"inputs", "outputs"}, {"fn_name", "inputs", "outputs"} or {"tests"}'
_CALL_TESTS = """
import json

def plain(value):
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

for arguments, expected in json.loads({cases!r}):
    assert plain({name}(*arguments)) == expected
"""


@dataclass(frozen=True)
class Tests:
    """Either pairs of stdin and stdout, or code that calls the program's functions."""

    pairs: Sequence[tuple[str, str]] = ()
    code: str | None = None


async def code_reward(config: "RunConfig", sample: "Sample") -> float:
    """1.0 if the program passes all tests within WALL_S seconds, and CPU_S a process; else 0.0.

    Raises:
        ValueError: the label holds no tests, or tests that never call the program.
        SandboxError: the sandbox can't be had here.
    """
    import asyncio  # here, so that a command line is read without it

    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool(), judge, label_of(sample), sample.response)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)) // 2), thread_name_prefix="code-reward")


def judge(label: str, response: str) -> float:
    """The reward of one response; blocks. Raises as `code_reward`."""
    try:
        check_sandbox()
    except UserError as error:
        raise SandboxError(str(error)) from error
    tests, program, deadline = read_tests(label), find_program(response), time.monotonic() + WALL_S
    if tests.code is not None:
        return float(_passes_code(program, tests.code, deadline))
    return float(all(_prints(program, stdin, expected, deadline) for stdin, expected in tests.pairs))


def find_program(response: str) -> str:
    """The program in a response; an unclosed last block counts up to the end."""
    text = after_thinking(response)
    text = response if text is None else text
    start, program = None, None
    for fence in _FENCE.finditer(text):
        if start is None:
            start, program = fence.end() + 1, None
        elif not fence.group(1):
            start, program = None, text[start : fence.start()]
    if start is not None:
        return text[start:]
    return text if program is None else program


def read_tests(label: str) -> Tests:
    """The tests that a label describes.

    Raises:
        ValueError: with what is wrong.
    """
    start = label[:80]
    try:
        described = json.loads(label)
    except json.JSONDecodeError as error:
        raise UserError(f"the label {start!r} of the reward code is not JSON ({error}); give {_KINDS}") from error
    keys = set(described) if isinstance(described, dict) else None
    if keys == {"tests"} and isinstance(described["tests"], str):
        try:
            ast.parse(described["tests"])
        except (SyntaxError, ValueError) as error:
            raise UserError(f"the tests in the label {start!r} are no Python: {error}") from error
        return Tests(code=described["tests"])
    if keys not in ({"inputs", "outputs"}, {"fn_name", "inputs", "outputs"}):
        raise UserError(f"the label {start!r} of the reward code must be one of {_KINDS}")
    pairs = [described["inputs"], described["outputs"]]
    if not all(isinstance(part, list) for part in pairs) or not len(pairs[0]) == len(pairs[1]) > 0:
        raise UserError(f"the label {start!r} of the reward code must have as many inputs as outputs, as lists")
    inputs, outputs = pairs
    if "fn_name" not in described:
        if not all(isinstance(text, str) for text in inputs + outputs):
            raise UserError(f"the label {start!r} has no fn_name: its inputs and outputs must be texts then")
        return Tests(pairs=tuple(zip(inputs, outputs, strict=True)))
    name = described["fn_name"]
    if not isinstance(name, str) or not name.isidentifier() or not all(isinstance(each, list) for each in inputs):
        raise UserError(f"the label {start!r} needs the name of a function as fn_name, and each input a list")
    cases = json.dumps(list(zip(inputs, outputs, strict=True)))
    return Tests(code=_CALL_TESTS.format(cases=cases, name=name))


def _prints(program: str, stdin: str, expected: str, deadline: float) -> bool:
    output = run_program(program, stdin, len(expected.encode()) + SPARE_OUTPUT, deadline)
    return output is not None and _lines(output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _passes_code(program: str, code: str, deadline: float) -> bool:
    """Program and tests in a process each; this one carries their messages, and reads those of the tests alone."""
    with (
        Confined("solution", program, deadline, subprocess.PIPE) as solution,
        Confined("tests", code, deadline, subprocess.PIPE) as tests,
    ):
        for _ in range(MOST_CALLS):
            answer = _message(solution)
            if answer is None or not _send(tests, answer):
                return False  # the program has ended, hangs, or answered at too great a length
            request = _message(tests)
            if request is None:
                return False  # an answer was too much for the tests
            if not request.startswith(b'{"call":'):
                result = json.loads(request)
                if result["passed"] and result["calls"] == 0:
                    raise UserError("the tests in the label pass without a call of the program")
                return result["passed"]
            if not _send(solution, request):
                return False
    return False


def _message(confined: Confined) -> bytes | None:
    line = confined.output.readline(LONGEST_MESSAGE)
    return line if line.endswith(b"\n") else None


def _send(confined: Confined, line: bytes) -> bool:
    assert confined.process.stdin is not None, "opened as a pipe"
    try:
        confined.process.stdin.write(line)
        confined.process.stdin.flush()
    except BrokenPipeError:
        return False
    return True


CODE = Reward(
    name="code",
    help="a Python program passes the label's tests",
    judge=code_reward,
    read_label=read_tests,
    check_machine=check_sandbox,
)
