"""What must hold for the plans of every legal policy, proved in a small world, with moves that fail and are repeated.

Each check is shown to notice a plan that is wrong.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.residency.plan import (
    ENGINE_REGIONS,
    TRAINER_REGIONS,
    Clear,
    Move,
    Phase,
    Place,
    Region,
    Sync,
    needs,
    plan,
    start,
    trainer_leaves,
    trainer_returns,
)
from tests.fast.residency.world import (
    ACTOR,
    CRITIC,
    ENGINE,
    KV,
    LEGAL,
    WEIGHTS,
    policy,
    simulate,
)


def test_every_legal_policy():
    for a_policy in LEGAL:
        simulate(a_policy, steps=2)


def test_every_legal_policy_with_a_failure_at_a_third_of_its_moves():
    for number, a_policy in enumerate(LEGAL):
        for position in range(number % 3, simulate(a_policy, steps=1), 3):
            simulate(a_policy, steps=1, failures={position: "middle"})


@settings(deadline=None, max_examples=300, database=None)
@given(
    a_policy=st.sampled_from(LEGAL),
    steps=st.integers(1, 3),
    failures=st.dictionaries(st.integers(0, 90), st.sampled_from(["before", "middle", "after"])),
)
def test_random_runs_with_failures(a_policy, steps, failures):
    simulate(a_policy, steps, failures)


@pytest.mark.parametrize("a_policy", LEGAL[::7])
def test_sleep_and_wake_up_mirror_each_other(a_policy):
    places = start(a_policy)
    for party in (ACTOR, CRITIC):
        leaves = trainer_leaves(party, a_policy)
        if party == ACTOR and a_policy.offload_train and a_policy.sync_gathers:
            assert Region.COMM not in {move.region for move in leaves}
            leaves += (COMM.reversed(),)  # after the sync
        assert trainer_returns(party, a_policy) == tuple(move.reversed() for move in reversed(leaves))
        if (party, WEIGHTS) in places:
            assert all(places[move.party, move.region] == move.source for move in leaves)


def back(party, region, source=Place.DROPPED):
    return Move(party, region, source, Place.GPU)


def at(phase, edit):
    """A planner whose list of steps at `phase` is edited."""
    return lambda when, a_policy: edit(list(plan(when, a_policy))) if when == phase else plan(when, a_policy)


def swapped(first, second):
    def edit(steps):
        one, other = steps.index(first), steps.index(second)
        steps[one], steps[other] = steps[other], steps[one]
        return steps

    return edit


def without(step):
    def edit(steps):
        steps.remove(step)
        return steps

    return edit


def always(another):
    """The plan of another policy."""
    return lambda when, a_policy: plan(when, another)


def with_a_copy(when, a_policy):
    """The engine's weights wait on the host, and go there before the trainer's have left it."""
    steps = plan(when, a_policy)
    there, copied = back(ENGINE, WEIGHTS), back(ENGINE, WEIGHTS, Place.HOST)
    steps = [{there: copied, there.reversed(): copied.reversed()}.get(step, step) for step in steps]
    return steps[:2] + steps[-1:] + steps[2:-1] if when == Phase.AFTER_GENERATE else steps


GENERATED, TRAINED = Phase.AFTER_GENERATE, Phase.AFTER_TRAIN
SLEEPS = back(ACTOR, WEIGHTS, Place.HOST).reversed()
OPTIMIZER = back(ACTOR, Region.OPTIMIZER, Place.HOST)
COPY = Move(ACTOR, Region.OPTIMIZER, Place.GPU, Place.DISK)
NO_OPTIMIZER = Move(ACTOR, Region.OPTIMIZER, Place.GPU, Place.DROPPED)
COMM, POOL, GRAPH = back(ACTOR, Region.COMM), back(ENGINE, KV), back(ENGINE, Region.CUDA_GRAPH)
ENGINE_IN = back(ENGINE, WEIGHTS)
CONTROLS = {  # the policy, a wrong planner, what is said about it
    "engine before the trainer has left": (policy(), at(TRAINED, swapped(SLEEPS, ENGINE_IN)), "two on the GPU"),
    "trainer before the engine has left": (
        policy(),
        at(GENERATED, swapped(SLEEPS.reversed(), ENGINE_IN.reversed())),
        "two on the GPU",
    ),
    "trainer never sleeps": (policy(), always(policy(train=False)), "two on the GPU"),
    "two copies on the host": (policy("gpu"), with_a_copy, "two on the host"),
    "kv cache before the sleep": (
        policy("gpu"),
        at(TRAINED, lambda s: [s[0], *s[-2:], *s[1:-2]]),
        "actor comm beside the kv cache",
    ),
    "caches not cleared": (policy("gpu"), at(TRAINED, without(Clear(ACTOR))), "beside the caches"),
    "no sync": (policy(), at(TRAINED, without(Sync())), "read, but not written"),
    "no sync, weights stay": (policy(levels={KV}), at(TRAINED, without(Sync())), "old weights"),
    "sync too early": (policy(), at(TRAINED, swapped(Sync(), ENGINE_IN)), "weights is read at"),
    "released after the sync": (
        policy(levels={WEIGHTS}),
        at(TRAINED, lambda s: [*s, ENGINE_IN.reversed(), ENGINE_IN]),
        "read, but not written",
    ),
    "kv cache forgotten": (policy(), at(TRAINED, without(POOL)), "kv_cache is read at"),
    "gradients forgotten": (policy(), at(GENERATED, without(back(ACTOR, Region.GRADS))), "grads is read at"),
    "optimizer does not leave": (
        policy(levels={WEIGHTS}),
        at(TRAINED, without(OPTIMIZER.reversed())),
        "optimizer leaves 0 times",
    ),
    "wrong source": (
        policy(levels={WEIGHTS}),
        at(Phase.TRAINER_BUILT, lambda s: [COPY if step == OPTIMIZER.reversed() else step for step in s]),
        "optimizer is not at host",
    ),
    "optimizer dropped": (
        policy(levels={WEIGHTS}),
        at(TRAINED, lambda s: [NO_OPTIMIZER if step == OPTIMIZER.reversed() else step for step in s]),
        "optimizer can't be rebuilt",
    ),
    "level not named": (policy("gpu", levels={KV}), always(policy("gpu")), "a region moves that stays"),
    "rebuilt before the masters are back": (
        policy(rematerialize=True),
        at(GENERATED, swapped(OPTIMIZER, back(ACTOR, WEIGHTS))),
        "optimizer is read at",
    ),
    "rebuilt before the groups are back": (
        policy(rematerialize=True),
        at(GENERATED, swapped(COMM, back(ACTOR, WEIGHTS))),
        "comm is read at",
    ),
    "rebuilt before the groups that left late are back": (
        policy(rematerialize=True, sync_gathers=True),
        at(GENERATED, lambda s: [*without(COMM)(s), COMM]),
        "comm is read at",
    ),
    "gathers without groups": (policy(sync_gathers=True), always(policy()), "comm is read at"),
    "groups beside the kv cache": (
        policy(sync_gathers=True),
        at(TRAINED, swapped(COMM.reversed(), POOL)),
        "actor comm beside the kv cache",
    ),
    "groups never leave": (
        policy(levels={WEIGHTS}, sync_gathers=True),
        at(TRAINED, without(COMM.reversed())),
        "actor comm leaves 0 times",
    ),
    "groups come back for the sync": (
        policy(sync_gathers=True),
        at(TRAINED, lambda s: [s[0], COMM.reversed(), *s[1 : s.index(Sync())], COMM, *s[s.index(Sync()) :]]),
        "actor comm leaves 2 times",
    ),
    "leaves twice": (policy(), at(TRAINED, lambda s: [*s, GRAPH.reversed(), GRAPH]), "cuda_graph leaves 2 times"),
    "sleeps and wakes in the set-up": (
        policy(),
        at(Phase.TRAINER_BUILT, lambda s: [*s, s[0].reversed(), s[0]]),
        "actor comm leaves 2 times",
    ),
    "critic stays": (
        policy(critic=True),
        at(Phase.AFTER_CRITIC, lambda s: [step for step in s if step.party == ACTOR]),
        "two on the GPU",
    ),
    "critic stays after the set-up": (policy(critic=True), at(Phase.CRITIC_BUILT, lambda s: []), "two on the GPU"),
    "actor comes for nothing": (
        policy(critic=True),
        lambda when, p: (
            plan(Phase.AFTER_CRITIC, p) + plan(Phase.AFTER_TRAIN, p)
            if when == Phase.AFTER_CRITIC_ONLY
            else plan(when, p)
        ),
        "a region moves that stays",
    ),
    "groups do not come for the sync of a sleeping actor": (
        policy(critic=True, sync_gathers=True),
        at(Phase.AFTER_CRITIC_ONLY, without(COMM)),
        "comm is read at",
    ),
    "no sync after the critic alone": (
        policy(critic=True),
        at(Phase.AFTER_CRITIC_ONLY, without(Sync())),
        "read, but not written",
    ),
    "trainer's way back": (policy(), at(GENERATED, swapped(OPTIMIZER, COMM)), "mirror image"),
    "engine's way back": (policy(), at(TRAINED, swapped(POOL, GRAPH)), "mirror image"),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_wrong_plan_is_noticed(name):
    a_policy, planner, words = CONTROLS[name]
    simulate(a_policy)
    with pytest.raises(AssertionError, match=words):
        simulate(a_policy, planner=planner)


def test_what_is_needed_is_what_is_used():
    for a_policy in LEGAL:
        trainer = set(TRAINER_REGIONS) - ({Region.OPTIMIZER} if a_policy.stream_optimizer else set())
        engine = {(ENGINE, region) for region in ENGINE_REGIONS}
        actor = {(ACTOR, region) for region in trainer}
        critic = {(CRITIC, region) for region in trainer}
        expected = {
            Phase.FIRST_SYNC: engine,
            TRAINED: engine,
            GENERATED: critic if a_policy.critic else actor,
            Phase.AFTER_CRITIC: actor,
            Phase.BEFORE_CRITIC_SAVE: critic - {(CRITIC, Region.GRADS)} if a_policy.critic else set(),
            Phase.AFTER_CRITIC_ONLY: engine,
            Phase.BEFORE_SAVE: actor - {(ACTOR, Region.GRADS)},
        }
        assert {phase: needs(phase, a_policy) for phase in Phase} == {p: expected.get(p, set()) for p in Phase}
