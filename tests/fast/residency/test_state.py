"""Every pair of a region's state and a call: what it leads to, or which error it raises."""

import itertools

import pytest

from miles.residency.plan import Move, Party, Place, Policy, Region, start
from miles.residency.state import RegionTable, ResidencyError, State

KEY = Party.ACTOR, Region.WEIGHTS
OUT = Move(*KEY, Place.GPU, Place.HOST)
BACK = OUT.reversed()
TO_DISK = Move(*KEY, Place.GPU, Place.DISK)
CAUSE = OSError("the cable is out")


def table_in(state):
    """A table of one region in `state`, and the words with which an error names the state."""
    place = {"leaving": "gpu", "stuck": "gpu", "returning": "host"}.get(state, state)
    table = RegionTable({KEY: Place(place)})
    if state in ("leaving", "stuck"):
        table.begin(OUT, "a phase")
    match state:
        case "stuck":
            table.interrupt(OUT, CAUSE)
        case "returning":
            table.begin(BACK, "a phase")
    return table


STATES = {
    "gpu": "gpu",
    "host": "host",
    "disk": "disk",
    "dropped": "dropped",
    "leaving": "moving from gpu to host",
    "returning": "moving from host to gpu",
    "stuck": "moving from gpu to host",
}
WITH_CAUSE = {"stuck"}
CALLS = {
    "begin out": lambda table: table.begin(OUT, "the tester"),
    "begin back": lambda table: table.begin(BACK, "the tester"),
    "begin to disk": lambda table: table.begin(TO_DISK, "the tester"),
    "check out": lambda table: table.check(OUT, "the tester"),
    "finish out": lambda table: table.finish(OUT),
    "finish back": lambda table: table.finish(BACK),
    "interrupt out": lambda table: table.interrupt(OUT, CAUSE),
    "require gpu": lambda table: table.require(*KEY, "the tester", frozenset({Place.GPU})),
    "require rest": lambda table: table.require(*KEY, "the tester"),
}
# The state that each legal pair leads to; every other pair is an error and changes nothing.
LEGAL = {
    **{(state, "begin out"): "moving" for state in ("gpu", "leaving", "stuck")},
    **{(state, "begin back"): "moving" for state in ("host", "returning")},
    ("gpu", "begin to disk"): "moving",
    **{(state, "check out"): STATES[state].split()[0] for state in ("gpu", "leaving", "stuck")},
    **{(state, "finish out"): "host" for state in ("leaving", "stuck")},
    ("returning", "finish back"): "gpu",
    **{(state, "interrupt out"): "moving" for state in ("leaving", "stuck")},
    ("gpu", "require gpu"): "gpu",
    **{(state, "require rest"): STATES[state] for state in ("gpu", "host", "disk", "dropped")},
}


@pytest.mark.parametrize(("state", "call"), itertools.product(STATES, CALLS))
def test_every_state_and_call(state, call):
    table = table_in(state)
    before = table.place(*KEY)
    assert before == STATES[state].split()[0]
    if (state, call) in LEGAL:
        CALLS[call](table)
        assert table.place(*KEY) == LEGAL[state, call]
        return
    with pytest.raises(ResidencyError) as error:
        CALLS[call](table)
    assert table.place(*KEY) == before
    message = str(error.value)
    assert message.startswith(f"actor weights is {STATES[state]}: ")
    assert ("the tester" in message) == ("begin" in call or "check" in call or "require" in call)
    assert ("OSError: the cable is out" in message) == (state in WITH_CAUSE)
    assert error.value.__cause__ is (CAUSE if state in WITH_CAUSE else None)


def test_a_cause_is_remembered_until_a_move_finishes():
    table = table_in("stuck")
    table.begin(OUT, "a phase")
    with pytest.raises(ResidencyError, match="the cable is out"):
        table.require(*KEY, "the tester")
    table.finish(OUT)
    with pytest.raises(ResidencyError) as error:
        table.begin(OUT, "a phase")
    assert str(error.value) == "actor weights is host: a phase wants to move it from gpu to host"


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


def test_states_are_the_places_and_one_more():
    assert [state for state in State if state not in list(Place)] == [State.MOVING]
    assert set(Place) <= set(State)
