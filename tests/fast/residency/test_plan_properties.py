"""What must hold for the plans of every legal policy, proved in a small world, with moves that fail and are repeated.

Each check is shown to notice a plan that is wrong.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.residency.plan import (
    ENGINE_REGIONS,
    TRAINER_REGIONS,
    Clear,
    Move,
    Party,
    Phase,
    Place,
    Policy,
    Region,
    Sync,
    needs,
    plan,
    start,
    trainer_leaves,
    trainer_returns,
)

ACTOR, CRITIC, ENGINE = Party
KV, WEIGHTS = Region.KV_CACHE, Region.WEIGHTS
BOTH = frozenset({KV, WEIGHTS})
LEVELS = [BOTH, frozenset({KV}), frozenset({WEIGHTS}), frozenset()]
BOOL = (True, False)
CHOICES = (BOOL, BOOL, LEVELS, (Place.HOST, Place.DISK), ("cpu", "gpu"), BOOL, BOOL, BOOL, BOOL, BOOL)
LEGAL = [policy for policy in itertools.starmap(Policy, itertools.product(*CHOICES)) if not policy.problems()]


def policy(peak="cpu", levels=BOTH, train=True, **others):
    return Policy(train, True, frozenset(levels), Place.HOST, peak, **others)


class World:
    """Who holds memory where, and whether it may be read.

    held: places that hold a region's bytes; two during a move, or after one that failed halfway.
    content: the version of the weights in them; None: garbage. Regions without lasting contents are not in it.
    caching: trainers whose allocators may hold free memory of the GPU.
    """

    def __init__(self, a_policy):
        self.policy = a_policy
        self.held = {(ENGINE, region): {Place.GPU} for region in ENGINE_REGIONS}
        self.content = {(ENGINE, WEIGHTS): 0}
        self.caching = set()
        self.moving = {}
        self.finished = []
        self.trainers_slept = False

    def build_trainer(self):
        for party in (ACTOR, CRITIC) if self.policy.critic else (ACTOR,):
            for region in TRAINER_REGIONS:
                streamed = region == Region.OPTIMIZER and self.policy.stream_optimizer
                self.held[party, region] = {Place.DISK if streamed else Place.GPU}
            self.content[party, WEIGHTS] = self.content[party, Region.OPTIMIZER] = 0
            self.caching.add(party)
        self.check_room()

    def do(self, step, failure=None):
        """One step; with `failure` it stops before, in the middle of or after its work, and has to be done again."""
        match step:
            case Move():
                self.move(step, failure)
            case Sync():
                self.sync(failure)
            case Clear(party):
                self.caching.discard(party)

    def move(self, move, failure):
        key = move.party, move.region
        if self.moving.get(key) != move:
            assert key not in self.moving, f"{move.party} {move.region} is still moving"
            assert self.held[key] == {move.source} - {Place.DROPPED}, (
                f"{move.party} {move.region} is not at {move.source}"
            )
        self.moving[key] = move
        if failure == "before":
            return
        self.held[key] = {move.source, move.target} - {Place.DROPPED}
        self.check_room()
        if move.party == ENGINE and not move.leaves:
            assert not self.caching, f"{move.region} returns beside the caches of the trainer"
        if move.target == Place.DROPPED:
            assert move.region != Region.OPTIMIZER, f"{move.party} {move.region} can't be rebuilt"
            if move.region == WEIGHTS:
                self.content[key] = None
        if move.source == Place.DROPPED and move.region == WEIGHTS and move.party != ENGINE:
            self.readable(move.party, Region.OPTIMIZER, {Place.GPU})
            self.readable(move.party, Region.COMM, {Place.GPU})
            self.content[key] = self.content[move.party, Region.OPTIMIZER]
        if failure == "middle":
            return
        self.held[key] = {move.target} - {Place.DROPPED}
        if failure == "after":
            return
        del self.moving[key]
        self.finished.append(move)
        if move.region == WEIGHTS and move.leaves:
            self.caching.discard(move.party)  # it sleeps

    def sync(self, failure):
        self.readable(ENGINE, WEIGHTS, {Place.GPU}, written=False)
        if self.held[ACTOR, WEIGHTS]:
            self.readable(ACTOR, WEIGHTS, {Place.GPU, Place.HOST, Place.DISK})
        else:
            self.readable(ACTOR, Region.OPTIMIZER, {Place.GPU, Place.HOST})
        if self.policy.sync_gathers:
            self.readable(ACTOR, Region.COMM, {Place.GPU})
        self.content[ENGINE, WEIGHTS] = None
        if failure in (None, "after"):
            self.content[ENGINE, WEIGHTS] = self.content[ACTOR, Region.OPTIMIZER]
        if failure is None:
            self.finished.append(Sync())

    def readable(self, party, region, places, written=True):
        key = party, region
        assert key not in self.moving, f"{party} {region} is read while it moves"
        assert len(self.held[key]) == 1 and self.held[key] <= places, f"{party} {region} is read at {self.held[key]}"
        assert not written or self.content.get(key, 0) is not None, f"{party} {region} is read, but not written"

    def check_room(self):
        """What the peak device promises."""
        if not (self.policy.offload_train and self.policy.offload_rollout):
            return
        copies = {place: [party for party in Party if place in self.held.get((party, WEIGHTS), ())] for place in Place}
        # With a critic, both trainers are built before either sleeps.
        if self.policy.peak_device == "cpu" and WEIGHTS in self.policy.levels:
            assert len(copies[Place.GPU]) <= 1 or (self.policy.critic and not self.trainers_slept), "two on the GPU"
        if self.policy.peak_device == "gpu":
            assert len(copies[Place.HOST]) <= 1, "two on the host"
        if KV in self.policy.levels and Place.GPU in self.held[ENGINE, KV]:
            for (party, region), places in self.held.items():
                assert party == ENGINE or Place.GPU not in places, f"{party} {region} beside the kv cache"

    def generate(self):
        for region in ENGINE_REGIONS:
            self.readable(ENGINE, region, {Place.GPU})
        assert self.content[ENGINE, WEIGHTS] == self.content[ACTOR, Region.OPTIMIZER], "old weights"

    def train(self, party):
        for region in TRAINER_REGIONS:
            streamed = region == Region.OPTIMIZER and self.policy.stream_optimizer
            self.readable(party, region, {Place.DISK if streamed else Place.GPU})
        assert self.content[party, WEIGHTS] == self.content[party, Region.OPTIMIZER]
        self.content[party, WEIGHTS] = self.content[party, Region.OPTIMIZER] = self.content[party, WEIGHTS] + 1
        self.caching.add(party)

    def save(self):
        for region in (WEIGHTS, Region.COMM):
            self.readable(ACTOR, region, {Place.GPU})
        self.readable(ACTOR, Region.OPTIMIZER, {Place.DISK if self.policy.stream_optimizer else Place.GPU})


def movable(a_policy):
    """What leaves, and returns, in a step."""
    keys = set()
    if a_policy.offload_rollout:
        keys |= {(ENGINE, Region.CUDA_GRAPH), *((ENGINE, level) for level in a_policy.levels)}
    if a_policy.offload_train:
        regions = set(TRAINER_REGIONS) - ({Region.OPTIMIZER} if a_policy.stream_optimizer else set())
        parties = (ACTOR, CRITIC) if a_policy.critic else (ACTOR,)
        keys |= {(party, region) for party in parties for region in regions}
    return keys


def check_moves(a_policy, steps, set_up):
    """Each region leaves and returns exactly once a step, and the way back mirrors the way out.

    In the set-up a trainer leaves once and does not return.
    """
    moves = [step for step in steps if isinstance(step, Move)]
    keys = movable(a_policy)
    assert {(move.party, move.region) for move in moves} <= keys, "a region moves that stays"
    for key in keys if not set_up else (key for key in keys if key[0] != ENGINE):
        ways = [move.leaves for move in moves if (move.party, move.region) == key]
        assert ways.count(True) == 1, " ".join((*key, "leaves", str(ways.count(True)), "times"))
        assert ways.count(False) == (0 if set_up else 1), " ".join((*key, "returns", str(ways.count(False)), "times"))
    for party in Party if not set_up else (ENGINE,):
        of_party = [move for move in moves if move.party == party]
        out, home = ([move for move in of_party if move.leaves is leaves] for leaves in (True, False))
        mirrored = [move.reversed() for move in reversed(out)]
        assert home == mirrored, f"{party}: {home} is not the mirror image of {out}"


def simulate(a_policy, steps=2, failures=(), planner=plan):
    """A run of so many steps; `failures` maps the number of a move, counted from the start, to how it fails."""
    failures = dict(failures)
    world, number = World(a_policy), itertools.count()

    def run(phase):
        for step in planner(phase, a_policy):
            while failure := failures.pop(next(number), None):
                world.do(step, failure)
            world.do(step)
        for party, region in needs(phase, a_policy):
            world.readable(party, region, {Place.GPU})
        assert not world.moving

    run(Phase.ENGINES_UP)
    world.build_trainer()
    run(Phase.TRAINER_BUILT)
    world.trainers_slept = True
    run(Phase.FIRST_SYNC)
    check_moves(a_policy, world.finished, set_up=True)
    for _ in range(steps):
        world.generate()
        world.finished = []
        run(Phase.AFTER_GENERATE)
        if a_policy.critic:
            world.train(CRITIC)
            run(Phase.AFTER_CRITIC)
        world.train(ACTOR)
        run(Phase.BEFORE_SAVE)
        world.save()
        run(Phase.AFTER_TRAIN)
        run(Phase.EVALUATION)
        check_moves(a_policy, world.finished, set_up=False)
    world.generate()
    run(Phase.SHUT_DOWN)
    return next(number)


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


@pytest.mark.parametrize("a_policy", LEGAL[::7], ids=repr)
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
            Phase.EVALUATION: engine,
            GENERATED: critic if a_policy.critic else actor,
            Phase.AFTER_CRITIC: actor,
            Phase.BEFORE_SAVE: actor - {(ACTOR, Region.GRADS)},
        }
        assert {phase: needs(phase, a_policy) for phase in Phase} == {p: expected.get(p, set()) for p in Phase}
