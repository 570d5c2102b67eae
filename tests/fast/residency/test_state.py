"""Every pair of where a region is and a call: what it leads to, or which error it raises."""

import itertools

import pytest

from miles.residency.plan import Move, Party, Place, Policy, Region, start
from miles.residency.state import RegionTable, ResidencyError

KEY = Party.ACTOR, Region.WEIGHTS
OUT = Move(*KEY, Place.GPU, Place.HOST)
BACK = OUT.reversed()
TO_DISK = Move(*KEY, Place.GPU, Place.DISK)


def table_in(state):
    """A table of one region in `state`."""
    table = RegionTable({KEY: Place({"leaving": "gpu", "returning": "host"}.get(state, state))})
    if state in ("leaving", "returning"):
        table.begin(OUT if state == "leaving" else BACK, "a phase")
    return table


# With what an error says of each.
STATES = {
    "gpu": "gpu",
    "host": "host",
    "disk": "disk",
    "dropped": "dropped",
    "leaving": "moving from gpu to host",
    "returning": "moving from host to gpu",
}
CALLS = {
    "begin out": lambda table: table.begin(OUT, "the tester"),
    "begin back": lambda table: table.begin(BACK, "the tester"),
    "begin to disk": lambda table: table.begin(TO_DISK, "the tester"),
    "finish out": lambda table: table.finish(OUT),
    "finish back": lambda table: table.finish(BACK),
    "require gpu": lambda table: table.require(*KEY, Place.GPU, "the tester"),
    "require host": lambda table: table.require(*KEY, Place.HOST, "the tester"),
}
# What each legal pair leads to; every other pair is an error and changes nothing.
LEGAL = {
    **{(state, "begin out"): OUT for state in ("gpu", "leaving")},
    **{(state, "begin back"): BACK for state in ("host", "returning")},
    ("gpu", "begin to disk"): TO_DISK,
    ("leaving", "finish out"): Place.HOST,
    ("returning", "finish back"): Place.GPU,
    ("gpu", "require gpu"): Place.GPU,
    ("host", "require host"): Place.HOST,
}


@pytest.mark.parametrize(("state", "call"), itertools.product(STATES, CALLS))
def test_every_state_and_call(state, call):
    table = table_in(state)
    before = table.place(*KEY)
    assert before == {"leaving": OUT, "returning": BACK}.get(state, state)
    if (state, call) in LEGAL:
        CALLS[call](table)
        assert table.place(*KEY) == LEGAL[state, call]
        return
    with pytest.raises(ResidencyError) as error:
        CALLS[call](table)
    assert table.place(*KEY) == before
    message = str(error.value)
    assert message.startswith(f"actor weights is {STATES[state]}: ")
    assert ("the tester" in message) == ("begin" in call or "require" in call)


NEVER = [
    Move(Party.ACTOR, Region.OPTIMIZER, Place.GPU, Place.DROPPED),
    Move(Party.CRITIC, Region.OPTIMIZER, Place.GPU, Place.DROPPED),
    Move(Party.ACTOR, Region.GRADS, Place.GPU, Place.HOST),
    Move(Party.ACTOR, Region.COMM, Place.GPU, Place.DISK),
    Move(Party.ENGINE, Region.WEIGHTS, Place.GPU, Place.HOST),
    Move(Party.ENGINE, Region.KV_CACHE, Place.GPU, Place.DISK),
    Move(Party.ENGINE, Region.CUDA_GRAPH, Place.GPU, Place.HOST),
    Move(Party.ACTOR, Region.WEIGHTS, Place.GPU, Place.GPU),
]


@pytest.mark.parametrize("move", NEVER, ids=repr)
def test_a_region_never_goes_where_it_cannot_come_back_from(move):
    places = start(Policy(True, True, frozenset(), Place.HOST, "cpu", critic=True))
    for a_move in (move, move.reversed()):
        table = RegionTable({**places, (move.party, move.region): a_move.source})
        with pytest.raises(ResidencyError, match=f"^{move.party} {move.region} is {a_move.source}: .* never legal$"):
            table.begin(a_move, "the tester")
        assert table.place(move.party, move.region) == a_move.source


def test_from_host_to_disk_is_no_move():
    table = RegionTable({KEY: Place.HOST})
    with pytest.raises(ResidencyError, match="never legal"):
        table.begin(Move(*KEY, Place.HOST, Place.DISK), "the tester")
