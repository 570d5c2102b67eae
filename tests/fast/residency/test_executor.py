"""Plans become calls; a call that fails is made again, and nothing else touches what it left behind."""

import asyncio
import itertools

import pytest

from miles.residency import executor as executor_module
from miles.residency.executor import Executor
from miles.residency.plan import Clear, Move, Party, Phase, Place, Policy, Region, Sync
from miles.residency.state import ResidencyError

ACTOR, CRITIC, ENGINE = Party
KV, WEIGHTS = Region.KV_CACHE, Region.WEIGHTS
BOTH = frozenset({KV, WEIGHTS})
SETS_OF_LEVELS = [BOTH, frozenset({KV}), frozenset({WEIGHTS}), frozenset()]
BOOL = (True, False)
CHOICES = (BOOL, BOOL, SETS_OF_LEVELS, (Place.HOST, Place.DISK), ("cpu", "gpu"), BOOL, BOOL, BOOL, BOOL, BOOL)
LEGAL = [policy for policy in itertools.starmap(Policy, itertools.product(*CHOICES)) if not policy.problems()]
SET_UP = (Phase.ENGINES_UP, Phase.TRAINER_BUILT, Phase.CRITIC_BUILT, Phase.FIRST_SYNC)
STEP = (Phase.AFTER_GENERATE, Phase.AFTER_CRITIC, Phase.BEFORE_SAVE, Phase.AFTER_TRAIN)
CRITIC_ONLY = (Phase.AFTER_GENERATE, Phase.BEFORE_CRITIC_SAVE, Phase.AFTER_CRITIC_ONLY)


def policy(peak="cpu", levels=BOTH, train=True, rollout=True, **others):
    return Policy(train, rollout, frozenset(levels), Place.HOST, peak, **others)


class Recorder:
    """All services of an executor. `calls`: what succeeded; `fail_at`: the number of the call, from 0, that raises."""

    def __init__(self, a_policy, fail_at=None):
        self.calls, self.fail_at, self.count = [], fail_at, itertools.count()
        services = {party: _Service(party, self) for party in Party}
        self.executor = Executor(a_policy, services, lambda: self.called("sync"))

    async def called(self, *call):
        await asyncio.sleep(0)
        if next(self.count) == self.fail_at:
            raise OSError("the cable is out")
        self.calls.append(" ".join(map(str, call)))
        return {"perf/all_time": 1.0, f"perf/{'_'.join(call[:2])}_time": 0.5}

    async def run(self, *phases):
        for phase in phases:
            await self.executor.run(phase)
        return self.calls


class _Service:
    def __init__(self, party, recorder):
        self._party, self._recorder = party, recorder

    async def move(self, moves):
        assert {move.party for move in moves} == {self._party}
        way = "leaves" if moves[0].leaves else "returns"
        assert {move.leaves for move in moves} == {moves[0].leaves}
        return await self._recorder.called(self._party, way, *(move.region for move in moves))

    async def clear_memory(self):
        return await self._recorder.called(self._party, "clear_memory")


POOLS_OUT, POOLS_IN = "engine leaves cuda_graph kv_cache", "engine returns kv_cache cuda_graph"
ENGINE_OUT = f"{POOLS_OUT} weights"
WEIGHTS_OUT, WEIGHTS_IN = "engine leaves weights", "engine returns weights"
SLEEP, WAKE = "actor leaves comm grads weights optimizer", "actor returns optimizer weights grads comm"
CRITIC_SLEEP, CRITIC_WAKE = (call.replace("actor", "critic") for call in (SLEEP, WAKE))
# Where the sync gathers, the groups stay for it.
NAP, GROUPS_OUT, GROUPS_IN = SLEEP.replace("comm ", ""), "actor leaves comm", "actor returns comm"
GATHERING_WAKE = "actor returns comm optimizer weights grads"
CALLS = {
    "cpu": (
        policy(),
        [ENGINE_OUT, SLEEP, WEIGHTS_IN, "sync", POOLS_IN],
        [ENGINE_OUT, WAKE, SLEEP, WEIGHTS_IN, "sync", POOLS_IN],
    ),
    "gpu, LoRA": (
        policy("gpu", lora=True),
        [POOLS_OUT, "actor leaves grads comm weights optimizer", "sync", POOLS_IN],
        [POOLS_OUT, "actor returns optimizer weights comm grads", WEIGHTS_OUT, "actor clear_memory"]
        + ["actor leaves grads", WEIGHTS_IN, "actor leaves comm weights optimizer", "sync", POOLS_IN],
    ),
    "gpu, LoRA, engine weights stay": (
        policy("gpu", levels={KV}, lora=True),
        [POOLS_OUT, "actor leaves grads comm weights optimizer", "sync", POOLS_IN],
        [POOLS_OUT, "actor returns optimizer weights comm grads", "actor clear_memory"]
        + ["actor leaves grads comm weights optimizer", "sync", POOLS_IN],
    ),
    "critic, gathers": (
        policy(critic=True, sync_gathers=True, levels={WEIGHTS}),
        ["engine leaves cuda_graph weights", NAP, CRITIC_SLEEP, WEIGHTS_IN]
        + ["sync", GROUPS_OUT, "engine returns cuda_graph"],
        ["engine leaves cuda_graph weights", CRITIC_WAKE, CRITIC_SLEEP, GATHERING_WAKE, NAP]
        + [WEIGHTS_IN, "sync", GROUPS_OUT, "engine returns cuda_graph"],
    ),
    "only the engines, no level, critic": (
        policy(train=False, levels=(), critic=True),
        ["engine leaves cuda_graph", "actor clear_memory", "critic clear_memory", "sync", "engine returns cuda_graph"],
        ["engine leaves cuda_graph", "actor clear_memory", "critic clear_memory", "sync", "engine returns cuda_graph"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_calls(name):
    a_policy, set_up, step = CALLS[name]
    assert await Recorder(a_policy).run(*SET_UP) == set_up
    assert await Recorder(a_policy).run(*SET_UP, *STEP, *STEP) == set_up + step + step


CRITIC_ONLY_CALLS = {
    "critic, gathers": ["engine leaves cuda_graph weights", CRITIC_WAKE, CRITIC_SLEEP, GROUPS_IN]
    + [WEIGHTS_IN, "sync", GROUPS_OUT, "engine returns cuda_graph"],
    "only the engines, no level, critic": ["engine leaves cuda_graph", "actor clear_memory", "critic clear_memory"]
    + ["engine returns cuda_graph"],
}


@pytest.mark.parametrize("name", CRITIC_ONLY_CALLS)
async def test_calls_of_a_step_for_the_critic_alone(name):
    a_policy, set_up, step = CALLS[name]
    calls = await Recorder(a_policy).run(*SET_UP, *CRITIC_ONLY, *CRITIC_ONLY, *STEP)
    assert calls == set_up + 2 * CRITIC_ONLY_CALLS[name] + step


AFTER_TRAIN = {
    "perf/all_time": 5.0,
    # The weights' and the pools' way back; of the actor, first its sleep and then its groups.
    **{"perf/actor_leaves_time": 1.0, "perf/engine_returns_time": 1.0, "perf/sync_time": 0.5},
}
AFTER_TRAIN_CALLS = 5


async def test_metrics_of_all_calls_are_added_up():
    recorder = Recorder(policy(sync_gathers=True))
    await recorder.run(*SET_UP, Phase.AFTER_GENERATE)
    assert await recorder.executor.run(Phase.BEFORE_SAVE) == {}
    assert await recorder.executor.run(Phase.AFTER_TRAIN) == AFTER_TRAIN


async def test_calls_before_a_failure_are_counted_once_when_the_phase_is_run_again():
    to_training = len(await Recorder(policy(sync_gathers=True)).run(*SET_UP, Phase.AFTER_GENERATE))
    for number in range(AFTER_TRAIN_CALLS):
        recorder = Recorder(policy(sync_gathers=True), fail_at=to_training + number)
        await recorder.run(*SET_UP, Phase.AFTER_GENERATE)
        with pytest.raises(OSError):
            await recorder.executor.run(Phase.AFTER_TRAIN)
        assert await recorder.executor.run(Phase.AFTER_TRAIN) == AFTER_TRAIN
        # The next phase starts anew.
        assert (await recorder.executor.run(Phase.AFTER_GENERATE))["perf/all_time"] == 2.0


def phases_of(a_policy):
    """A run of two steps, the first for the critic alone if there is one."""
    return (*SET_UP, *(CRITIC_ONLY if a_policy.critic else STEP), *STEP)


async def different_policies():
    """One policy for each list of calls that there is, with the list."""
    found = {}
    for a_policy in LEGAL:
        found.setdefault((*await Recorder(a_policy).run(*phases_of(a_policy)), a_policy.critic), a_policy)
    return {a_policy: list(calls[:-1]) for calls, a_policy in found.items()}


async def test_every_call_may_fail_and_is_made_again():
    policies = await different_policies()
    assert len(policies) > 25
    for a_policy, calls in policies.items():
        for position in range(len(calls)):
            recorder = Recorder(a_policy, fail_at=position)
            for phase in phases_of(a_policy):
                try:
                    await recorder.run(phase)
                except OSError:
                    assert recorder.calls == calls[:position]
                    await everything_else_is_refused(recorder, a_policy, phase)
                    await recorder.run(phase)
            assert recorder.calls == calls
            assert next(recorder.count) == len(calls) + 1


async def everything_else_is_refused(recorder, a_policy, failed):
    """None of the other phases gets as far as a call, nor is anything saved."""
    calls = list(recorder.calls)
    for phase in set(Phase) - {failed}:
        words = f"phase {phase} can't come: phase {failed} has not ended, which failed: OSError: the cable is out"
        for refused in (recorder.executor.run(phase), checked(recorder.executor, phase)):
            with pytest.raises(ResidencyError) as error:
                await refused
            assert str(error.value) == words
    assert recorder.calls == calls


async def checked(executor, phase):
    executor.check(phase)


async def test_a_call_that_failed_is_the_cause_of_a_refusal():
    recorder = Recorder(policy(), fail_at=1)
    await recorder.run(Phase.ENGINES_UP)
    with pytest.raises(OSError) as failed:
        await recorder.run(Phase.TRAINER_BUILT)
    with pytest.raises(ResidencyError) as error:
        recorder.executor.check(Phase.BEFORE_SAVE)
    assert error.value.__cause__ is failed.value
    assert recorder.calls == [ENGINE_OUT]


async def test_weights_that_a_sync_left_half_written_are_not_read():
    recorder = Recorder(policy(levels={KV}, rollout=False), fail_at=1)
    await recorder.run(Phase.ENGINES_UP, Phase.TRAINER_BUILT)
    with pytest.raises(OSError):
        await recorder.run(Phase.FIRST_SYNC)
    with pytest.raises(ResidencyError, match="phase first_sync has not ended, which failed: OSError: the cable is out"):
        await recorder.run(Phase.AFTER_GENERATE)
    await recorder.run(Phase.FIRST_SYNC, Phase.AFTER_GENERATE)


@pytest.mark.parametrize("rollout", BOOL)
async def test_a_sync_does_not_read_a_trainer_that_is_moving(rollout):
    recorder = Recorder(policy(rollout=rollout), fail_at=1 if rollout else 0)
    await recorder.run(Phase.ENGINES_UP)
    with pytest.raises(OSError):
        await recorder.run(Phase.TRAINER_BUILT)
    assert recorder.executor.table.place(ACTOR, WEIGHTS) == Move(ACTOR, WEIGHTS, Place.GPU, Place.HOST)
    with pytest.raises(ResidencyError, match="^phase first_sync can't come: phase trainer_built has not ended"):
        await recorder.run(Phase.FIRST_SYNC)
    await recorder.run(Phase.TRAINER_BUILT, Phase.FIRST_SYNC)
    assert [call for call in recorder.calls if "engine" not in call] == [SLEEP, "sync"]


async def test_a_phase_at_the_wrong_time_calls_nothing():
    recorder = Recorder(policy())
    await recorder.run(*SET_UP)
    with pytest.raises(ResidencyError) as error:
        await recorder.run(Phase.AFTER_TRAIN)
    assert str(error.value) == "actor comm is dropped: phase after_train needs it gpu"
    await recorder.run(Phase.AFTER_GENERATE)
    with pytest.raises(ResidencyError, match="^engine cuda_graph is dropped: phase after_generate needs it gpu$"):
        await recorder.run(Phase.AFTER_GENERATE)
    assert recorder.calls[5:] == [ENGINE_OUT, WAKE]


# Plans that the planner never makes: what the executor says to each.
WRONG = {
    "a sync into released weights": (
        [Move(ENGINE, WEIGHTS, Place.GPU, Place.DROPPED), Sync()],
        "^engine weights is dropped: the weight sync in phase first_sync needs it gpu",
    ),
    "a sync without the groups": (
        [Move(ACTOR, Region.COMM, Place.GPU, Place.DROPPED), Sync()],
        "^actor comm is dropped: the weight sync in phase first_sync needs it gpu",
    ),
    "a region twice": (
        [Move(ACTOR, WEIGHTS, Place.GPU, Place.HOST), Clear(ACTOR), Move(ACTOR, WEIGHTS, Place.GPU, Place.HOST)],
        "^actor weights is host: phase first_sync wants to move it from gpu to host",
    ),
    "half a pool": (
        [Move(ENGINE, KV, Place.GPU, Place.DROPPED)],
        "^engine kv_cache is dropped: phase first_sync needs it gpu",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_plan_is_noticed(name, monkeypatch):
    steps, words = WRONG[name]
    recorder = Recorder(policy(sync_gathers=True))
    monkeypatch.setattr(executor_module, "plan", lambda phase, a_policy: tuple(steps))
    with pytest.raises(ResidencyError, match=words):
        await recorder.run(Phase.FIRST_SYNC)


async def test_moves_travel_as_they_are(monkeypatch):
    """Whatever is planned: half a sleep, another order, one region alone."""
    out = [Move(ACTOR, region, Place.GPU, Place.DROPPED) for region in (Region.GRADS, Region.COMM, WEIGHTS)]
    steps = [*out[:2], Move(CRITIC, Region.GRADS, Place.GPU, Place.DROPPED), out[2], out[1].reversed()]
    made = []

    class Service:
        async def move(self, moves):
            made.append(moves)
            return {}

    executor = Executor(policy(critic=True), dict.fromkeys(Party, Service()), None)
    monkeypatch.setattr(executor_module, "plan", lambda phase, a_policy: tuple(steps))
    await executor.run(Phase.CRITIC_BUILT)
    assert made == [tuple(steps[:2]), (steps[2],), (steps[3],), (steps[4],)]


async def test_cancelled_in_a_call():
    """The regions stay moving, and the phase goes on with that call."""
    recorder = Recorder(policy())
    waiting = asyncio.create_task(recorder.run(Phase.ENGINES_UP))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ResidencyError, match="^phase first_sync can't come: .*engines_up has not ended, .* Cancelled"):
        await recorder.run(Phase.FIRST_SYNC)
    assert await recorder.run(Phase.ENGINES_UP) == [ENGINE_OUT]
