import asyncio
import time

import pytest
import ray
from ray.exceptions import ActorDiedError

from miles.backends.trainer.launch import Launch
from miles.config import RunConfig
from miles.ray.cluster import speaks_grpc
from miles.ray.failure import inside
from miles.ray.lazy_actor import ActorClient
from miles.ray.train import group
from miles.utils.errors import one_line, sentence_of

pytestmark = pytest.mark.real

# Importable in the actors' processes only, as Megatron's and SGLang's classes are meant to be.
MODULE = '''
import asyncio
import os
import signal
import time

from miles.utils.errors import UserError


class Counter:
    def __init__(self, start, step=1):
        if start < 0:
            raise UserError(f"start is {start}, it must not be negative")
        if start > 100:
            raise ValueError(f"start is {start}: a fault of the program")
        self.value, self.step = start, step

    def add(self, *values):
        self.value += self.step * sum(values)
        return self.value

    def refuse(self, value):
        raise ValueError(f"{value} is refused")

    def where(self):
        return os.getcwd()

    def fail(self):
        error = KeyError("name")
        error.add_note("of a folder")
        raise error

    def refuse_with_a_note(self):
        error = UserError("give less")
        error.add_note("of 3")
        raise error


class Meeting:
    """Returns only once `count` calls wait at the same time."""

    def __init__(self, count):
        self.count, self.waiting = count, 0

    async def meet(self, name):
        self.waiting += 1
        while self.waiting < self.count:
            await asyncio.sleep(0.01)
        return name

    def plain(self):
        return self.waiting

    async def refuse(self):
        raise ValueError("not today")


class Rank:
    """The last one dies of a signal while the others wait for it."""

    def __init__(self, config, rank, world_size):
        self.last = rank == world_size - 1

    def sleep(self):
        if self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
'''


@pytest.fixture(scope="module")
def options(tmp_path_factory, local_ray):
    """Ray options of an actor that can import `lazy_example`."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "lazy_example.py").write_text(MODULE)
    return {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": str(folder)}}}


def test_methods_and_references(options):
    with pytest.raises(ModuleNotFoundError):
        import lazy_example  # noqa: F401

    counter = ActorClient("lazy_example.Counter", 10, 2, options=options)

    async def go():
        first = counter.add(1, 2)
        assert await first == 16
        # A reference among the arguments arrives as what it stands for.
        return await counter.add(ray.put(4), first)

    assert asyncio.run(go()) == 56


def test_it_works_where_the_driver_does(options, monkeypatch, tmp_path):
    """Whatever folder Ray was started in, as on a cluster."""
    monkeypatch.chdir(tmp_path)
    counter = ActorClient("lazy_example.Counter", 0, options=options)

    async def go():
        return await counter.where()

    assert asyncio.run(go()) == str(tmp_path)


def test_errors_keep_their_type(options):
    counter = ActorClient("lazy_example.Counter", 0, options=options)

    async def go():
        with pytest.raises(ValueError, match="7 is refused") as caught:
            await counter.refuse(7)
        assert str(caught.value.cause) == "7 is refused"
        with pytest.raises(KeyError) as caught:
            await counter.fail()
        assert one_line(caught.value.cause) == "KeyError: 'name'; of a folder"
        with pytest.raises(AttributeError, match="no_such_method"):
            await counter.no_such_method()
        assert await counter.add(1) == 1  # it lives on

    asyncio.run(go())


def test_what_a_user_is_told_crosses_processes_with_its_notes(options):
    refused, faulty = (ActorClient("lazy_example.Counter", start, options=options) for start in (-1, 101))
    asker = ActorClient("lazy_example.Counter", 0, options=options)

    async def failure(call):
        with pytest.raises(Exception) as caught:
            await call
        return caught.value

    async def go():
        first = await failure(asker.refuse_with_a_note())
        assert sentence_of(first, inside) == "give less\nof 3" and "in refuse_with_a_note" in str(first)
        # Handed on by another actor it stays what it is.
        assert sentence_of(await failure(asker.add(refused.add(1))), inside) == "start is -1, it must not be negative"
        fault = await failure(faulty.add(1))
        assert sentence_of(fault, inside) is None and "start is 101: a fault of the program" in str(fault)

    asyncio.run(go())


def test_coroutines_run_side_by_side(options):
    meeting = ActorClient("lazy_example.Meeting", 3, options=options, concurrent=True)

    async def go():
        names = await asyncio.wait_for(asyncio.gather(*(meeting.meet(name) for name in "abc")), timeout=60)
        with pytest.raises(ValueError, match="not today"):
            await meeting.refuse()
        return names, await meeting.plain()

    assert asyncio.run(go()) == (["a", "b", "c"], 3)


@pytest.mark.parametrize(
    ("concurrent", "start_at", "error", "message"),
    [(False, -1, ValueError, "start is -1, it must not be negative"), (True, None, TypeError, "not supported between")],
)
def test_an_error_of_the_constructor_keeps_its_type(options, concurrent, start_at, error, message):
    counter = ActorClient("lazy_example.Counter", start_at, options=options, concurrent=concurrent)

    async def go():
        with pytest.raises(error, match=message):
            await counter.add(1)

    start = time.monotonic()
    asyncio.run(go())
    assert time.monotonic() - start < 30


def test_a_rank_that_is_killed_ends_the_call_and_the_ranks_that_wait_for_it(options, monkeypatch):
    monkeypatch.setattr(group, "GRACE_SECONDS", 1.0)
    variables = options["runtime_env"]["env_vars"]
    launch = Launch("lazy_example.Rank", "no critic", lambda config: variables, lambda config, rank: rank)
    monkeypatch.setattr(group.TrainGroup, "launch", launch)
    trainer = group.TrainGroup(RunConfig.model_construct(), [{"num_cpus": 0}] * 2, ["one", "two"])

    async def go():
        with pytest.raises(ActorDiedError) as caught:
            await asyncio.wait_for(trainer.sleep(), timeout=120)
        # It is gone as well.
        with pytest.raises(ActorDiedError):
            await asyncio.wait_for(trainer.ranks[0].sleep(), timeout=60)
        return caught.value.__notes__

    first, ended = asyncio.run(go())
    assert first.startswith("trainer rank 1 on two failed in sleep; its process was ended by a signal")
    assert ended == "trainer rank 0 on one did not answer within 1 s of it and had to be ended"


def test_a_running_head_is_known_as_one(options):
    assert speaks_grpc(ray.get_runtime_context().gcs_address)


def test_private_names_are_not_methods(options):
    counter = ActorClient("lazy_example.Counter", 0, options=options)
    assert not hasattr(counter, "_value") and not hasattr(counter, "__deepcopy__")
