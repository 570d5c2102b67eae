import json
import time

import pytest

from miles.rewards import code, sandbox
from miles.rewards.code import find_program, judge, read_tests
from miles.rewards.compute import compute_rewards
from miles.utils.types import Sample

ADD = json.dumps({"tests": "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'"})
SUMS = json.dumps({"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]})
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]})
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture
def short(monkeypatch):
    """Little time for each program."""
    monkeypatch.setattr(sandbox, "CPU_S", 1)
    monkeypatch.setattr(code, "WALL_S", 3.0)  # a busy machine needs a second for two processes to start


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("So:\n```python\nprint(1)\n```\nThat is it.", "print(1)\n"),
        ("```py\nprint(1)\n```\nno:\n```python\nprint(2)\n```", "print(2)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n", "print(1)\n"),
        ("```python\nprint(1)", "print(1)"),
        ("```python", ""),
        ("````python\nprint(1)\n````", "print(1)\n"),
        ("<think>```python\nbad\n```</think>\nprint(3)", "\nprint(3)"),
        ("<think>\n```python\nbad\n</think>\n```python\nprint('ä')\n```", "print('ä')\n"),
        ("use `print` or ```print``` here", "use `print` or ```print``` here"),
        ("```python\ns = '''\n```python\n'''\n```", "s = '''\n```python\n'''\n"),
        ("", ""),
    ],
)
def test_which_program_counts(response, program):
    assert find_program(response) == program


@pytest.mark.parametrize("part", ["`", "```", "```a", " ```", "\n```", "a", "``` `"])
def test_a_long_text_is_searched_in_time(part):
    start = time.process_time()
    find_program(part * 300_000)
    find_program("```" + part * 300_000 + "`")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("label", "program", "reward"),
    [
        (SUMS, "a, b = map(int, input().split())\nprint(a + b)", 1),
        (SUMS, "a, b = map(int, input().split())\nprint(a + b, end='  \\n\\n')", 1),
        (SUMS, "if __name__ == '__main__':\n    print(sum(map(int, input().split())))", 1),
        (SUMS, "a, b = map(int, input().split())\nprint(a + b)\nexit()", 1),
        (SUMS, "a, b = map(int, input().split())\nprint(a + b)\nquit(0)\nprint(1)", 1),
        (SUMS, "a, b = map(int, input().split())\nprint(a + b)\nexit(1)", 0),
        (SUMS, "a, b = map(int, input().split())\nprint(a + b)\nexit('no')", 0),
        (CALLS, RIGHT + "exit()", 1),
        (CALLS, RIGHT + "quit(1)", 0),
        (CALLS, "def add(a, b):\n    exit()", 0),
        (SUMS, "print(3)", 0),
        (SUMS, "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)", 0),
        (SUMS, "print('3\\n7')", 0),
        (SUMS, "print(' 3')", 0),
        (SUMS, "", 0),
        (SUMS, "The sum is 3.", 0),
        (CALLS, RIGHT, 1),
        (CALLS, "class Solution:\n    def add(self, a, b):\n        return a + b", 1),
        (CALLS, "def add(a, b):\n    return (a + b) if isinstance(a, int) else tuple(a + b)", 1),
        (CALLS, "print('noise', flush=True)\nimport os\nos.write(1, b'{}')\n" + RIGHT, 1),
        (CALLS, "add = lambda a, b: a + b", 1),
        (CALLS, "def add(a, b):\n    return 3", 0),
        (CALLS, "def sub(a, b):\n    return a + b", 0),
        (CALLS, "def add(a, b):\n    return str(a + b)", 0),
        (CALLS, "def add(a, b)", 0),
        (ADD, RIGHT, 1),
        (ADD, "def add(a, b):\n    return 3", 0),
    ],
)
def test_verdicts(label, program, reward):
    assert judge(label, program) == reward


@pytest.mark.parametrize(
    ("tests", "program", "reward"),
    [
        ("def check(f):\n    assert f(2) == 4\ncheck(square)", "def square(x): return x * x", 1),
        ("from solution import square\ndef test_it():\n    assert square(3) == 9", "def square(x): return x * x", 1),
        ("from solution import square\ndef test_it():\n    assert square(3) == 9", "def square(x): return x + x", 0),
        ("assert pair(b'x', k={1: (2, {3})}) == ((b'x', {1: (2, {3})}),)", "def pair(a, k): return ((a, k),)", 1),
        ("assert big() == 10**5000 and isinstance(big(), int)", "def big(): return 10 ** 5000", 1),
        ("try:\n    f()\n    assert False\nexcept ValueError as e:\n    assert 'no' in str(e)",
         "def f(): raise ValueError('no')", 1),
        ("try:\n    f()\n    assert False\nexcept ValueError:\n    pass", "def f(): raise KeyError('no')", 0),
        ("assert count([1, 1, 2]) == {1: 2, 2: 1}",
         "from collections import Counter\ndef count(x): return Counter(x)", 1),
        ("assert word() == 'é\\U0001f600'", "def word(): return 'é\\U0001f600'", 1),
    ],
)  # fmt: skip
def test_tests_in_python(tests, program, reward):
    assert judge(json.dumps({"tests": tests}), program) == reward


CHEATS = {
    "end before the tests": "raise SystemExit(0)",
    "end in the call": "import os\ndef add(a, b): os._exit(0)",
    "raise SystemExit in the call": "def add(a, b): raise SystemExit(0)",
    "equal to anything": "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "an equal subclass": """
class Any(int):
    __eq__ = lambda self, other: True
    __hash__ = int.__hash__
def add(a, b): return Any(7)
""",
    "an equal string": """
class Any(str):
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
def add(a, b): return Any("7")
""",
    "an equal list": "class Any(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "claim to have passed": """
import os
for number in range(64):
    try:
        os.write(number, b'{"passed": true, "calls": 9}\\n' * 9)
    except OSError:
        pass
def add(a, b): return 0
""",
    "claim so in the call": """
import os
def add(a, b):
    for number in range(64):
        try:
            os.write(number, b'{"passed": true, "calls": 9}\\n' * 9)
        except OSError:
            pass
""",
    "name more functions": """
import json, os
names = json.dumps({"functions": ["add", "all", "isinstance", "AssertionError", "test_add", "__builtins__"]})
for number in range(3, 64):
    try:
        os.write(number, names.encode() + b"\\n")
    except OSError:
        pass
def add(a, b): return 0
""",
    "other builtins": "import builtins\nbuiltins.all = builtins.isinstance = lambda *a: True\ndef all(x): return True\n"
    "def add(a, b): return 0",
    "a function named as a test": "def test_add(): return 0\ndef add(a, b): return 0",
    "look for the tests in memory": """
import gc, sys
def add(a, b):
    frame = sys._getframe()
    seen = []
    while frame:
        seen.append(str(frame.f_globals) + str(frame.f_locals))
        frame = frame.f_back
    return 3 if 'assert' + ' add(' in str(seen) + str(gc.get_objects()) else 0
""",
    "look for the tests on disk": "def add(a, b): return eval(open('/proc/self/cmdline').read())",
    "raise what the tests catch": "def add(a, b): raise AssertionError",
    "end a loop of the tests": "def add(a, b): raise StopIteration",
    "a deep answer": "def add(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x",
    "a huge answer": "def add(a, b): return 'x' * (1 << 22)",
}


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
@pytest.mark.parametrize(
    "tests",
    [
        "assert add(1, 2) == 3",
        "assert all(map(lambda x: add(x, 2) == x + 2, (1, 2)))",
        "def test_add():\n    assert all(add(x, 2) == x + 2 for x in (1, 2))\n    assert isinstance(add(1, 2), int)",
    ],
)
def test_cheating_does_not_pay(program, tests):
    assert judge(json.dumps({"tests": tests}), program) == 0


@pytest.mark.real
@pytest.mark.parametrize("label", [SUMS, CALLS, ADD])
@pytest.mark.parametrize(
    "program", ["while True: pass", "import time\ntime.sleep(99)", "def add(a, b):\n    while True: pass\nadd(1, 2)"]
)
def test_a_program_that_does_not_end_is_worth_nothing(label, program, short):
    start = time.monotonic()
    assert judge(label, program) == 0
    assert time.monotonic() - start < 15


@pytest.mark.real
def test_a_program_that_reads_nothing_can_be_sent_much(short):
    label = json.dumps({"tests": "assert add(1, 'x' * 900_000) == 3"})
    assert judge(label, RIGHT.replace("return", "import time; time.sleep(99); return")) == 0


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("assert add(1, 2) == 3", "is not JSON"),
        ("[1]", "must be one of"),
        ("{}", "must be one of"),
        ('{"tests": 1}', "must be one of"),
        ('{"tests": "assert ("}', "are no Python"),
        ('{"inputs": ["1"], "outputs": []}', "as many inputs as outputs"),
        ('{"inputs": [], "outputs": []}', "as many inputs as outputs"),
        ('{"inputs": [1], "outputs": ["1"]}', "must be texts then"),
        ('{"fn_name": "a b", "inputs": [[1]], "outputs": [1]}', "needs the name of a function as fn_name"),
        ('{"fn_name": "f", "inputs": [1], "outputs": [1]}', "each input a list"),
    ],
)
def test_a_label_without_tests_is_an_error(label, message):
    with pytest.raises(ValueError, match=message):
        read_tests(label)


def test_tests_that_call_nothing_are_an_error():
    with pytest.raises(ValueError, match="pass without a call of the program"):
        judge(json.dumps({"tests": "def check(f):\n    assert f(1)"}), RIGHT)


async def test_as_a_rollout_calls_it(engine_config):
    config = engine_config.model_copy(update={"rm_type": "code"})
    responses = [f"```python\n{RIGHT}```", "```python\ndef add(a, b): return 3\n```", "no", ""]
    samples = [Sample(index=i, response=text, label=ADD) for i, text in enumerate(responses)]
    samples.append(Sample(index=4, response=RIGHT, label="42"))
    counts = await compute_rewards(config, samples)
    assert [sample.reward for sample in samples] == [1, 0, 0, 0, None]
    assert counts.errors == 1 and "must be one of" in counts.first_error


TAKES_OVER = """
import json, os

def first(use):
    for number in range(3, 64):
        try:
            use(number)
        except OSError:
            continue
        return number

names = json.dumps({"functions": ["add", "all", "test_add"]}).encode() + b"\\n"
out = first(lambda number: os.write(number, names))
into = first(lambda number: os.read(number, 1 << 16))
while True:
    os.write(out, b'{"value": true}\\n')
    os.read(into, 1 << 16)
"""


@pytest.mark.parametrize(
    "tests", ["assert all([add(1, 2) == 3])", "def test_add():\n    assert add(1, 2) == 3\nassert add(1, 2)"]
)
def test_a_program_that_speaks_for_itself_has_no_builtins_to_offer(tests, short):
    assert judge(json.dumps({"tests": tests}), TAKES_OVER) == 0
