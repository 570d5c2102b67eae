"""A small world in which plans are run, with moves that fail and are repeated, and what must hold in it."""

import itertools

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

    def build(self, party):
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
        if self.policy.peak_device == "cpu" and WEIGHTS in self.policy.levels:
            assert self.copies(Place.GPU) <= 1, "two on the GPU"
        if self.policy.peak_device == "gpu":
            assert self.copies(Place.HOST) <= 1, "two on the host"
        if KV in self.policy.levels and Place.GPU in self.held[ENGINE, KV]:
            for (party, region), places in self.held.items():
                assert party is ENGINE or Place.GPU not in places, f"{party} {region} beside the kv cache"

    def copies(self, place):
        """How many parties hold weights there."""
        return sum(place in self.held.get((party, WEIGHTS), ()) for party in (ACTOR, CRITIC, ENGINE))

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

    def save(self, party):
        for region in (WEIGHTS, Region.COMM):
            self.readable(party, region, {Place.GPU})
        self.readable(party, Region.OPTIMIZER, {Place.DISK if self.policy.stream_optimizer else Place.GPU})


def movable(a_policy, actor_stays_away=False):
    """What leaves, and returns, in a step; with `actor_stays_away` in one that trains the critic alone."""
    keys = set()
    if a_policy.offload_rollout:
        keys |= {(ENGINE, Region.CUDA_GRAPH), *((ENGINE, level) for level in a_policy.levels)}
    if a_policy.offload_train:
        regions = set(TRAINER_REGIONS) - ({Region.OPTIMIZER} if a_policy.stream_optimizer else set())
        parties = (ACTOR, CRITIC) if a_policy.critic else (ACTOR,)
        keys |= {(party, region) for party in parties for region in regions}
    if actor_stays_away:
        keys = {key for key in keys if key[0] != ACTOR}
        if a_policy.offload_train and a_policy.sync_gathers and (ENGINE, WEIGHTS) in keys:
            keys.add((ACTOR, Region.COMM))  # for the sync
    return keys


def check_moves(a_policy, steps, set_up=False, actor_stays_away=False):
    """Each region leaves and returns exactly once a step, and the way back mirrors the way out.

    In the set-up a trainer leaves once and does not return.
    """
    moves = [step for step in steps if isinstance(step, Move)]
    keys = movable(a_policy, actor_stays_away)
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
    """A run of so many steps; `failures` maps the number of a move, counted from the start, to how it fails.

    With a critic two steps that train it alone come first; the second of them is saved.
    """
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

    def step(trains_actor=True, actor_comes=True):
        world.generate()
        world.finished = []
        run(Phase.AFTER_GENERATE)
        if a_policy.critic:
            world.train(CRITIC)
            run(Phase.BEFORE_CRITIC_SAVE)
            world.save(CRITIC)
        if actor_comes:
            run(Phase.AFTER_CRITIC)
            if trains_actor:
                world.train(ACTOR)
            run(Phase.BEFORE_SAVE)
            world.save(ACTOR)
            run(Phase.AFTER_TRAIN)
        else:
            run(Phase.AFTER_CRITIC_ONLY)
        world.generate()  # an evaluation
        check_moves(a_policy, world.finished, actor_stays_away=not actor_comes)

    run(Phase.ENGINES_UP)
    world.build(ACTOR)
    run(Phase.TRAINER_BUILT)
    if a_policy.critic:
        world.build(CRITIC)
        run(Phase.CRITIC_BUILT)
    run(Phase.FIRST_SYNC)
    check_moves(a_policy, world.finished, set_up=True)
    if a_policy.critic:
        step(actor_comes=False)
        step(trains_actor=False)
    for _ in range(steps):
        step()
    world.generate()
    return next(number)
