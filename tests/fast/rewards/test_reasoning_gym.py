"""Tasks of reasoning-gym: right, nearly right and wrong answers, unreadable ones, and those that are programs."""

import json
import threading

import pytest

from miles.rewards import BUILT_IN, reasoning_gym
from miles.rewards.compute import compute_rewards
from miles.rewards.reasoning_gym import find_answer, reasoning_gym_reward
from miles.tools.make_prompts import reasoning_gym_rows
from miles.utils.arguments import parse_args
from miles.utils.types import Sample

pytest.importorskip("reasoning_gym")


def sample_of(task, response=None, **entry):
    """A sample as make_prompts writes it, with the right answer as its response, unless another is given."""
    _, label, metadata = next(reasoning_gym_rows(task, seed=1, size=1))
    metadata["entry"] |= entry
    return Sample(index=0, group_index=0, response=label if response is None else response, metadata=metadata)


async def worth(task, response=None, **entry):
    return await reasoning_gym_reward(None, sample_of(task, response, **entry))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (" 5\n", "5"),
        ("so <answer> 5 </answer>.", "5"),
        ("<answer>4</answer> no, <answer>5</answer>", "5"),
        ("<think><answer>4</answer></think>5", "5"),
        ("<think>4</think>so<answer>5</answer>", "5"),
        ("<answer>5", "<answer>5"),
        ("5</answer>", "5</answer>"),
        ("</answer><answer>5", "</answer><answer>5"),
        ("<answer><answer>5</answer>", "5"),
        ("", ""),
    ],
)
def test_where_the_answer_stands(response, answer):
    assert find_answer(response) == answer


@pytest.mark.parametrize(
    "task", ["chain_sum", "countdown", "spiral_matrix", "prime_factorization", "maze", "leg_counting"]
)
async def test_its_own_answer_is_right(task):
    assert await worth(task) == 1
    assert await worth(task, "certainly not this") < 0.1


async def test_nearly_right_is_worth_something():
    right = sample_of("spiral_matrix").response.split()
    assert await worth("spiral_matrix", f"[{', '.join(right)}]") == 0.1


async def test_what_its_scorer_chokes_on_is_wrong():
    assert await worth("prime_factorization", "The answer is 5.") == 0
    assert await worth("spiral_matrix", "[" * 100_000) == 0


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (sample_of("prime_factorization", answer="x"), "can't judge the row's own answer either: ValueError"),
        (sample_of("chain_sum", metadata={"source_dataset": "chain_sums"}), "task chain_sums: .*not registered"),
        (sample_of("chain_sum", metadata={}), "the metadata has 'entry'"),
        (Sample(response="5", metadata={"a": 1}), "the metadata has 'a'"),
        (Sample(response="5"), "the metadata has nothing"),
    ],
)
async def test_a_row_that_it_cannot_judge_is_an_error(sample, message):
    with pytest.raises(ValueError, match=message):
        await reasoning_gym_reward(None, sample)


async def test_it_is_chosen_by_the_row(engine_flags):
    right, wrong, unusable = sample_of("chain_sum"), sample_of("chain_sum", "?"), sample_of("chain_sum", metadata={})
    for sample in (right, wrong, unusable):
        sample.metadata["rm_type"] = "reasoning_gym"
    counts = await compute_rewards(parse_args(engine_flags), [right, wrong, unusable])
    assert (right.reward, unusable.reward, counts.errors) == (1, None, 1) and wrong.reward < 0.1


async def test_answers_that_are_programs_reach_nothing(tmp_path):
    """spiral_matrix evaluates an answer that starts with a bracket as Python."""
    mark = tmp_path / "mark"
    for attempt in (
        f"open({str(mark)!r}, 'w').write('x')",
        f"__import__('os').system('touch {mark}')",
        f"__import__('os').mkdir({str(mark)!r})",
    ):
        assert await worth("spiral_matrix", f"[{attempt}]") == 0
        assert not mark.exists()


@pytest.fixture
def pool(monkeypatch):
    """One worker, whose answers may take one second."""
    monkeypatch.setattr(reasoning_gym, "CPU_S", 1)
    monkeypatch.setattr(reasoning_gym, "WALL_S", 2.0)
    reasoning_gym._pool.cache_clear()
    monkeypatch.setattr(reasoning_gym.os, "sched_getaffinity", lambda pid: range(1))
    pool = reasoning_gym._pool()
    monkeypatch.setattr(pool, "threads", type(pool.threads)(1))
    yield pool
    pool.close()
    reasoning_gym._pool.cache_clear()


async def test_an_answer_never_touches_the_next(pool):
    """What is evaluated lives in a process of its own: it can neither change the scorer nor end the worker."""
    assert await worth("spiral_matrix") == 1
    pids = [worker.pid for worker in pool._workers.values()]
    for attempt in (
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os')._exit(0)",
        "[__import__('os').write(file, b'{\"score\": 1.0}\\n') for file in range(1, 64)]",
        "setattr(__import__('sys').modules['reasoning_gym'], 'create_dataset', None)",
        "__import__('builtins').__dict__.clear()",
        "bytearray(10**10)",
        "__import__('os').write(3, b'[' * 1999) and __import__('os')._exit(0)",
        "__import__('os').write(3, b'\\xff') and __import__('os')._exit(0)",
    ):
        assert await worth("spiral_matrix", f"[{attempt}]") == 0
    assert await worth("spiral_matrix") == 1
    assert [worker.pid for worker in pool._workers.values()] == pids


@pytest.mark.real
def test_limits_hold_in_any_thread(pool):
    """Both kinds of endless answers: those that compute, and those that wait."""
    samples = [sample_of("countdown", "9**9**9**9"), sample_of("spiral_matrix", "[__import__('time').sleep(999)]")]
    requests = [{"entry": sample.metadata["entry"], "answer": sample.response} for sample in samples]
    results = []
    thread = threading.Thread(target=lambda: results.extend(map(pool.ask, requests)))
    thread.start()
    thread.join(60)
    assert results == [{"score": 0.0}] * 2


async def test_a_missing_package_is_named(monkeypatch):
    sample = sample_of("chain_sum")
    reasoning_gym._pool.cache_clear()
    monkeypatch.setattr(reasoning_gym.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        BUILT_IN["reasoning_gym"].check_machine()
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        await reasoning_gym_reward(None, sample)


def test_a_request_is_a_line_whatever_is_in_it(pool):
    entry = sample_of("chain_sum").metadata["entry"]
    for answer in ("a\nb", "\0", "\ud800", "\u2028 ä"):
        assert json.loads(json.dumps(pool.ask({"entry": entry, "answer": answer})))["score"] < 1
