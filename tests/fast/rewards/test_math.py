import asyncio
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from miles.rewards.compute import compute_rewards
from miles.rewards.math import MathPool, MathTimeout
from miles.utils.types import Sample

HANGS = r"\boxed{(10^{9})!}"

# What a response is worth against a label: the choices of math-verify 0.9 and of the extraction in front of it.
TABLE = [
    # numbers in their forms
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1),
    (r"\boxed{.5}", "0.5", 1),
    (r"\boxed{\dfrac{1}{2}}", r"\frac12", 1),
    (r"\boxed{2/4}", "1/2", 1),
    (r"\boxed{1,000}", "1000", 1),
    (r"\boxed{1e3}", "1000", 1),
    (r"\boxed{5.0}", "5", 1),
    (r"\boxed{-0}", "0", 1),
    (r"\boxed{0}", "0", 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    ("12345678901234567890123", "12345678901234567890124", 0),
    # a per cent sign matches both readings
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{50\%}", "0.5", 1),
    # decimals are exact, but for what at least six digits round
    ("0.333333", "1/3", 1),
    ("0.33", "1/3", 0),
    ("0.00000001", "0.00000002", 0),
    ("1/100000000", "1/200000000", 0),
    # units, currency, text, an equation's left side
    (r"\boxed{10 cm}", "10", 1),
    (r"\boxed{10\text{ meters}}", "10", 1),
    (r"\boxed{$5}", "5", 1),
    (r"\boxed{\text{13}}", "13", 1),
    (r"\boxed{x=5}", "5", 1),
    # sets have no order, tuples have one
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
    (r"\boxed{ (1,2) }", "(1, 2)", 1),
    (r"\boxed{ (2,1) }", "(1, 2)", 0),
    # formulas
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
    (r"\boxed{x^2+1}", "x^2-1", 0),
    # which answer counts: the last box, then what follows "answer", then the last number
    (r"\fbox{7}", "7", 1),
    (r"\boxed{4}, no: \boxed{5}", "5", 1),
    (r"\boxed{4}, no: \boxed{5}", "4", 0),
    (r"\boxed{} but 4", "4", 0),
    ("<think> hm \\boxed{4}", "4", 1),
    ("The answer is 42, because 50 > 42.", "42", 1),
    ("The answer is 3 + 4 = 7.", "7", 1),
    ("I take $x$ of them. The answer is 42", "42", 1),
    ("**73**", "73", 1),
    ("27 + 58 = 85", "85", 1),
    ("27 + 58", "85", 1),
    ("3 * (4 + 5)", "27", 1),
    ("It is 85 apples.", "85", 1),
    ("x^2+1", "1+x^2", 1),
    ("The answer is 2x", "2", 0),
    ("no answer", "5", 0),
    ("", "5", 0),
    ("1/0", "5", 0),
    # labels may be marked as mathematics
    ("4", "$4$", 1),
    ("4", r"\boxed{4}", 1),
]


@pytest.fixture(scope="module")
def pool():
    pool = MathPool(workers=2, time_limit_s=5.0)
    yield pool
    pool.close()


def judge(pool, label, response):
    return pool.threads.submit(pool.judge, label, response).result(timeout=60)


@pytest.mark.parametrize(("response", "label", "reward"), TABLE)
def test_table(pool, response, label, reward):
    assert judge(pool, label, response) == reward


@pytest.mark.parametrize("pair", [("0.5", "1/2"), ("7", "8"), ("1000", "1,000"), ("2^10", "1024"), ("-3", "3")])
def test_plain_numbers_compare_alike_both_ways(pool, pair):
    assert judge(pool, *pair) == judge(pool, *reversed(pair))


@pytest.mark.parametrize("label", ["", "???", "{", "The answer is 4", r"\frac{0}{0}"])
def test_an_unreadable_label_is_an_error(pool, label):
    with pytest.raises(ValueError, match="can't be read as mathematics"):
        judge(pool, label, "4")


@pytest.mark.real
def test_a_hang_ends_by_itself_and_the_worker_is_replaced():
    pool = MathPool(workers=1, time_limit_s=2.0)
    try:
        assert judge(pool, "4", "4") == 1
        first = [worker.pid for worker in pool._workers.values()]
        with pytest.raises(MathTimeout, match="more than 2 s"):
            judge(pool, "5", HANGS)
        assert judge(pool, "4", "4") == 1
        assert [worker.pid for worker in pool._workers.values()] != first
    finally:
        pool.close()
    for pid in first:
        assert not os.path.exists(f"/proc/{pid}")


def test_a_worker_that_is_killed_is_an_error_and_is_replaced(pool):
    assert judge(pool, "4", "4") == 1
    for worker in pool._workers.values():
        worker.kill()
        worker.wait()
    died = 0
    for _ in range(6):
        try:
            assert judge(pool, "4", "4") == 1
        except RuntimeError as error:
            assert "math worker ended with status -9" in str(error)
            died += 1
    assert 1 <= died <= 2


def test_many_cheap_answers_do_not_eat_each_others_time():
    pool = MathPool(workers=2, time_limit_s=1.0)
    try:
        futures = [pool.threads.submit(pool.judge, str(i), rf"\boxed{{{i}}}") for i in range(200)]
        assert [future.result(timeout=60) for future in futures] == [1.0] * 200
    finally:
        pool.close()


def test_rewards_in_another_thread_leave_the_event_loop_free(engine_config):
    """The whole way, as a rollout calls it: an event loop in a thread, which goes on ticking meanwhile."""
    config = engine_config.model_copy(update={"rm_type": "math"})
    samples = [Sample(index=i, group_index=0, response=f"= {i}", label="3" if i else "???") for i in range(8)]
    outcome = {}

    async def main():
        gaps, last = [], time.monotonic()
        task = asyncio.create_task(compute_rewards(config, samples))
        while not task.done():
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        outcome.update(counts=await task, longest_gap=max(gaps))

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(timeout=60)
    assert [sample.reward for sample in samples] == [None, 0, 0, 1, 0, 0, 0, 0]
    assert outcome["counts"].errors == 1 and "'???' can't be read" in outcome["counts"].first_error
    assert outcome["longest_gap"] < 0.5


@pytest.mark.parametrize(
    "part", ["1", "1 + ", "(", "-", "{", "$1", r"\boxed{", r"\frac{1}{", "2^", "1e", r"\( x ", "- 1 "]
)
def test_rambling_is_judged_in_time(pool, part):
    assert judge(pool, "5", part * (20_000 // len(part))) == 0


PAYLOAD = "__import__('os').system('touch {marker}')"
WRAPPERS = [
    "{0}",
    r"\boxed{{{0}}}",
    "The answer is {0}",
    "${0}$",
    r"\text{{{0}}}",
    r"\boxed{{\text{{{0}}}}}",
    r"\frac{{{0}}}{{1}}",
    "1 + {0}",
    "(1).__class__.__base__.__subclasses__() + {0}",
    "3*(4+5)",
    "2**10",
    "The answer is (1/2)",
]
WATCHED = """
import sys
from miles.rewards.math_worker import judge
seen = []
sys.addaudithook(lambda event, args: seen.append((event, args)))
for text in sys.argv[1:]:
    for label in ("5", text):
        try:
            judge(label, text)
        except ValueError:
            pass
for event, args in seen:
    if event in ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect"):
        print(event, args)
    if event == "compile" and str(args[1]).startswith("<"):
        print("compile", (args[0] or b"syntax tree").decode().splitlines()[0])
"""
# sympy itself compiles number literals one at a time, its unit symbols and generated functions on monomials.
SYMPYS_OWN = re.compile(
    r"compile (from sympy import \*|(Integer|Float|Symbol) \('?[\w.]+'? \)|E |def monomial_\w+\(.*)"
)


def test_text_of_the_model_is_never_evaluated(tmp_path):
    """Python's audit events show every compile and process start: hostile text and plain arithmetic cause none."""
    marker = tmp_path / "executed"
    texts = [wrapper.format(PAYLOAD.format(marker=marker)) for wrapper in WRAPPERS]
    result = subprocess.run(
        [sys.executable, "-c", WATCHED, *texts],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    events = result.stdout.splitlines()
    assert "compile Integer (5 )" in events  # the watch works
    assert [event for event in events if not SYMPYS_OWN.fullmatch(event)] == []
    assert not marker.exists()
