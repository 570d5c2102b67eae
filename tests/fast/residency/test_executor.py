"""Plans become calls; a call that fails is made again, and nothing else touches what it left behind."""

import asyncio
import itertools

import pytest

from miles.residency import executor as executor_module
from miles.residency.executor import Executor
from miles.residency.plan import Clear, Move, Party, Phase, Place, Policy, Region, Sync, needs, plan, start
from miles.residency.state import ResidencyError

ACTOR, CRITIC, ENGINE = Party
KV, WEIGHTS = Region.KV_CACHE, Region.WEIGHTS
BOTH = frozenset({KV, WEIGHTS})
SETS_OF_LEVELS = [BOTH, frozenset({KV}), frozenset({WEIGHTS}), frozenset()]
BOOL = (True, False)
CHOICES = (BOOL, BOOL, SETS_OF_LEVELS, (Place.HOST, Place.DISK), ("cpu", "gpu"), BOOL, BOOL, BOOL, BOOL, BOOL)
LEGAL = [policy for policy in itertools.starmap(Policy, itertools.product(*CHOICES)) if not policy.problems()]
SET_UP = (Phase.ENGINES_UP, Phase.TRAINER_BUILT, Phase.CRITIC_BUILT, Phase.FIRST_SYNC)
STEP = (Phase.AFTER_GENERATE, Phase.AFTER_CRITIC, Phase.BEFORE_SAVE, Phase.AFTER_TRAIN, Phase.EVALUATION)
CRITIC_ONLY = (Phase.AFTER_GENERATE, Phase.BEFORE_CRITIC_SAVE, Phase.AFTER_CRITIC_ONLY, Phase.EVALUATION)


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
        return {"perf/all_time": 1.0, f"perf/{call[-1] if len(call) == 2 else call[0]}_time": 0.5}

    async def run(self, *phases):
        for phase in phases:
            await self.executor.run(phase)
        return self.calls


class _Service:
    def __init__(self, party, recorder):
        self._party, self._recorder = party, recorder

    def __getattr__(self, verb):
        return lambda *arguments: self._recorder.called(self._party, verb, *arguments)


ENGINE_OUT = "engine offload ['cuda_graph', 'kv_cache', 'weights']"
CALLS = {
    "cpu": (
        policy(),
        [ENGINE_OUT, "actor sleep", "engine onload_weights", "sync", "engine onload_kv"],
        [ENGINE_OUT, "actor onload", "actor sleep", "engine onload_weights", "sync", "engine onload_kv"],
    ),
    "gpu, LoRA": (
        policy("gpu", lora=True),
        ["engine offload_kv", "actor sleep", "sync", "engine onload_kv"],
        ["engine offload_kv", "actor onload", "engine offload_weights", "actor clear_memory"]
        + ["actor offload_grad_buffer", "engine onload_weights", "actor sleep", "sync", "engine onload_kv"],
    ),
    "gpu, LoRA, engine weights stay": (
        policy("gpu", levels={KV}, lora=True),
        ["engine offload_kv", "actor sleep", "sync", "engine onload_kv"],
        ["engine offload_kv", "actor onload", "actor clear_memory", "actor sleep", "sync", "engine onload_kv"],
    ),
    "critic, gathers": (
        policy(critic=True, sync_gathers=True, levels={WEIGHTS}),
        ["engine offload ['cuda_graph', 'weights']", "actor sleep", "critic sleep", "engine onload_weights"]
        + ["sync", "actor destroy_process_groups", "engine onload_kv"],
        ["engine offload ['cuda_graph', 'weights']", "critic onload", "critic sleep", "actor onload", "actor sleep"]
        + ["engine onload_weights", "sync", "actor destroy_process_groups", "engine onload_kv"],
    ),
    "only the engines, no level, critic": (
        policy(train=False, levels=(), critic=True),
        ["engine offload_kv", "actor clear_memory", "critic clear_memory", "sync", "engine onload_kv"],
        ["engine offload_kv", "actor clear_memory", "critic clear_memory", "sync", "engine onload_kv"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_calls(name):
    a_policy, set_up, step = CALLS[name]
    assert await Recorder(a_policy).run(*SET_UP) == set_up
    assert await Recorder(a_policy).run(*SET_UP, *STEP, *STEP) == set_up + step + step


CRITIC_ONLY_CALLS = {
    "critic, gathers": ["engine offload ['cuda_graph', 'weights']", "critic onload", "critic sleep"]
    + ["actor reload_process_groups", "engine onload_weights", "sync", "actor destroy_process_groups"]
    + ["engine onload_kv"],
    "only the engines, no level, critic": ["engine offload_kv", "actor clear_memory", "critic clear_memory"]
    + ["engine onload_kv"],
}


@pytest.mark.parametrize("name", CRITIC_ONLY_CALLS)
async def test_calls_of_a_step_for_the_critic_alone(name):
    a_policy, set_up, step = CALLS[name]
    calls = await Recorder(a_policy).run(*SET_UP, *CRITIC_ONLY, *CRITIC_ONLY, *STEP)
    assert calls == set_up + 2 * CRITIC_ONLY_CALLS[name] + step


AFTER_TRAIN = {
    "perf/all_time": 5.0,
    **{f"perf/{verb}_time": 0.5 for verb in ("sleep", "onload_weights", "sync", "destroy_process_groups", "onload_kv")},
}


async def test_metrics_of_all_calls_are_added_up():
    recorder = Recorder(policy(sync_gathers=True))
    await recorder.run(*SET_UP, Phase.AFTER_GENERATE)
    assert await recorder.executor.run(Phase.AFTER_TRAIN) == AFTER_TRAIN
    assert await recorder.executor.run(Phase.EVALUATION) == {}


async def test_calls_before_a_failure_are_counted_once_when_the_phase_is_run_again():
    to_training = len(await Recorder(policy(sync_gathers=True)).run(*SET_UP, Phase.AFTER_GENERATE))
    for number in range(len(AFTER_TRAIN) - 1):
        recorder = Recorder(policy(sync_gathers=True), fail_at=to_training + number)
        await recorder.run(*SET_UP, Phase.AFTER_GENERATE)
        with pytest.raises(OSError):
            await recorder.executor.run(Phase.AFTER_TRAIN)
        assert await recorder.executor.run(Phase.SHUT_DOWN) == {}  # nothing to do, nothing forgotten
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
    """No other phase touches a region that is moving, nor needs one, and none gets as far as a call."""
    table, calls = recorder.executor.table, list(recorder.calls)
    stuck = {key for key in start(a_policy) if table.place(*key) == "moving"}
    for phase in set(Phase) - {failed}:
        moves = {(step.party, step.region) for step in plan(phase, a_policy) if isinstance(step, Move)}
        reads = {(ACTOR, WEIGHTS), (ACTOR, Region.OPTIMIZER)} if Sync() in plan(phase, a_policy) else set()
        if (moves | reads) & stuck:
            with pytest.raises(ResidencyError, match=f"phase {phase} needs it"):
                await recorder.run(phase)
        elif needs(phase, a_policy) & stuck:
            with pytest.raises(ResidencyError, match=f"phase {phase} needs it"):
                recorder.executor.check(phase)
    assert recorder.calls == calls


async def test_an_error_names_party_region_state_cause_and_caller():
    recorder = Recorder(policy(), fail_at=1)
    await recorder.run(Phase.ENGINES_UP)
    with pytest.raises(OSError):
        await recorder.run(Phase.TRAINER_BUILT)
    with pytest.raises(ResidencyError) as error:
        recorder.executor.check(Phase.BEFORE_SAVE)
    assert str(error.value) == (
        "actor comm is moving from gpu to dropped: phase before_save needs it gpu; its last move failed: OSError: "
        "the cable is out"
    )
    with pytest.raises(ResidencyError) as error:
        await recorder.run(Phase.AFTER_TRAIN)  # it begins with the moves that failed
    assert str(error.value) == (
        "actor comm is moving from gpu to dropped: phase after_train needs it gpu; its last move failed: OSError: "
        "the cable is out"
    )
    assert recorder.calls == [ENGINE_OUT]


async def test_weights_that_a_sync_left_half_written_are_not_read():
    recorder = Recorder(policy(levels={KV}, rollout=False), fail_at=1)
    await recorder.run(Phase.ENGINES_UP, Phase.TRAINER_BUILT)
    recorder.executor.check(Phase.EVALUATION)
    with pytest.raises(OSError):
        await recorder.run(Phase.FIRST_SYNC)
    with pytest.raises(ResidencyError) as error:
        await recorder.run(Phase.EVALUATION)
    assert str(error.value) == (
        "engine weights is on the gpu, but the weight sync in phase first_sync failed: OSError: the cable is out: "
        "phase evaluation needs it"
    )
    await recorder.run(Phase.FIRST_SYNC, Phase.EVALUATION)


@pytest.mark.parametrize("rollout", BOOL)
async def test_a_sync_does_not_read_a_trainer_that_is_moving(rollout):
    recorder = Recorder(policy(rollout=rollout), fail_at=1 if rollout else 0)
    await recorder.run(Phase.ENGINES_UP)
    with pytest.raises(OSError):
        await recorder.run(Phase.TRAINER_BUILT)
    with pytest.raises(ResidencyError, match="^actor weights is moving from gpu to host: phase first_sync needs it at"):
        await recorder.run(Phase.FIRST_SYNC)
    await recorder.run(Phase.TRAINER_BUILT, Phase.FIRST_SYNC)
    assert [call for call in recorder.calls if "engine" not in call] == ["actor sleep", "sync"]


async def test_a_phase_at_the_wrong_time_calls_nothing():
    recorder = Recorder(policy())
    await recorder.run(*SET_UP)
    with pytest.raises(ResidencyError) as error:
        await recorder.run(Phase.AFTER_TRAIN)
    assert str(error.value) == "actor comm is dropped: phase after_train needs it gpu"
    await recorder.run(Phase.AFTER_GENERATE)
    with pytest.raises(ResidencyError, match="^engine cuda_graph is dropped: phase after_generate needs it gpu$"):
        await recorder.run(Phase.AFTER_GENERATE)
    with pytest.raises(ResidencyError, match="^engine cuda_graph is dropped: phase evaluation needs it gpu$"):
        await recorder.run(Phase.EVALUATION)
    assert recorder.calls[5:] == [ENGINE_OUT, "actor onload"]


# Plans that the planner never makes: what the executor says to each.
WRONG = {
    "released weights are not written": (
        [Move(ENGINE, WEIGHTS, Place.GPU, Place.DROPPED), Move(ENGINE, WEIGHTS, Place.DROPPED, Place.GPU)],
        ResidencyError,
        "no weight sync has written it since it left: phase evaluation",
    ),
    "a sync into released weights": (
        [Move(ENGINE, WEIGHTS, Place.GPU, Place.DROPPED), Sync()],
        ResidencyError,
        "^engine weights is dropped: the weight sync in phase evaluation needs it gpu",
    ),
    "a sync without the groups": (
        [Move(ACTOR, Region.COMM, Place.GPU, Place.DROPPED), Sync()],
        ResidencyError,
        "^actor comm is dropped: the weight sync in phase evaluation needs it gpu",
    ),
    "half a sleep": (
        [Move(ACTOR, Region.COMM, Place.GPU, Place.DROPPED), Clear(ACTOR)]
        + [Move(ACTOR, WEIGHTS, Place.GPU, Place.HOST)],
        AssertionError,
        "sleep moves",
    ),
    "half a pool": ([Move(ENGINE, KV, Place.GPU, Place.DROPPED)], AssertionError, "offload_kv and onload_kv move"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_plan_is_noticed(name, monkeypatch):
    steps, error, words = WRONG[name]
    recorder = Recorder(policy(sync_gathers=True))
    monkeypatch.setattr(executor_module, "plan", lambda phase, a_policy: tuple(steps))
    with pytest.raises(error, match=words):
        await recorder.run(Phase.EVALUATION)


async def test_cancelled_in_a_call():
    """The regions stay moving, and the phase goes on with that call."""
    recorder = Recorder(policy())
    waiting = asyncio.create_task(recorder.run(Phase.ENGINES_UP))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ResidencyError, match="^engine cuda_graph is moving from gpu to dropped: phase evaluation"):
        await recorder.run(Phase.EVALUATION)
    assert await recorder.run(Phase.ENGINES_UP) == [ENGINE_OUT]
