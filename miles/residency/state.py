"""Where each region is at the moment, and which changes are legal: one table for all parties, which the driver keeps.

No call goes out for a move that the table refuses: torch_memory_saver would end the process, and SGLang's server too. A
party knows only how far its last moves came, so that it makes none twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from miles.residency.plan import Move, Party, Place, Region

# Where a region may be besides the GPU. Only what is rebuilt or zeroed may be dropped: an optimizer never.
AWAY = {
    (Party.ENGINE, Region.WEIGHTS): {Place.DROPPED},
    (Party.ENGINE, Region.KV_CACHE): {Place.DROPPED},
    (Party.ENGINE, Region.CUDA_GRAPH): {Place.DROPPED},
    **{
        (party, region): places
        for party in (Party.ACTOR, Party.CRITIC)
        for region, places in {
            Region.WEIGHTS: {Place.HOST, Place.DISK, Place.DROPPED},
            Region.OPTIMIZER: {Place.HOST, Place.DISK},
            Region.GRADS: {Place.DROPPED},
            Region.COMM: {Place.DROPPED},
        }.items()
    },
}


class State(StrEnum):
    """A place of `Place`, or `moving`: a move has begun and not ended."""

    GPU = Place.GPU
    HOST = Place.HOST
    DISK = Place.DISK
    DROPPED = Place.DROPPED
    MOVING = "moving"


class ResidencyError(RuntimeError):
    """A region is not where a caller needs it. The message names party, region, its state and the caller."""


@dataclass(frozen=True)
class _Entry:
    state: State
    move: Move | None = None  # the one that has begun, while `moving`
    cause: BaseException | None = None  # what stopped its last move


class RegionTable:
    """The state of each region; every change goes through a move that begins and then finishes.

    Args:
        places: where each region is at the start, see `miles.residency.plan.start`.
    """

    def __init__(self, places: Mapping[tuple[Party, Region], Place]):
        self._entries = {key: _Entry(State(place)) for key, place in places.items()}

    def place(self, party: Party, region: Region) -> State:
        """The state of a region; where it rests, it equals the `Place`."""
        return self._entries[party, region].state

    def check(self, move: Move, caller: str) -> None:
        """Raise unless the move may begin.

        A region that is already moving may begin the same move again: what moves it is idempotent.

        Args:
            caller: who wants to move it, for the error.

        Raises:
            ResidencyError: the region is not at the move's source, is in the middle of another move, or may never go
                where the move wants it.
        """
        entry = self._entries[move.party, move.region]
        away = move.target if move.leaves else move.source
        if Place.GPU not in (move.source, move.target) or away not in AWAY[move.party, move.region]:
            raise self._error(move.party, move.region, f"{caller} wants to move it {_way(move)}, which is never legal")
        if entry.state != move.source and entry.move != move:
            raise self._error(move.party, move.region, f"{caller} wants to move it {_way(move)}")

    def begin(self, move: Move, caller: str) -> None:
        """The move begins: the region is `moving` until `finish`. Raises as `check` does."""
        self.check(move, caller)
        cause = self._entries[move.party, move.region].cause
        self._entries[move.party, move.region] = _Entry(State.MOVING, move, cause)

    def finish(self, move: Move) -> None:
        """The move is complete: the region is at its target."""
        self._moving(move)
        self._entries[move.party, move.region] = _Entry(State(move.target))

    def interrupt(self, move: Move, cause: BaseException) -> None:
        """The move has ended with an error on some rank, and another may have finished it: the region stays `moving`.

        Only the same move may begin again. The cause is part of later errors about the region, until a move finishes.
        """
        self._moving(move)
        entry = self._entries[move.party, move.region]
        self._entries[move.party, move.region] = replace(entry, cause=cause)

    def require(self, party: Party, region: Region, caller: str, places: frozenset[Place] = frozenset(Place)) -> None:
        """Raise unless the region rests at one of `places`.

        Raises:
            ResidencyError: it is elsewhere or moving; `caller` is who needs it.
        """
        if self.place(party, region) not in places:
            wanted = " or ".join(sorted(places)) if len(places) < len(Place) else "at rest"
            raise self._error(party, region, f"{caller} needs it {wanted}")

    def _moving(self, move: Move) -> None:
        entry = self._entries[move.party, move.region]
        if entry.state != State.MOVING or entry.move != move:
            raise self._error(move.party, move.region, f"the end of its move {_way(move)}, which has not begun")

    def _error(self, party: Party, region: Region, problem: str) -> ResidencyError:
        entry = self._entries[party, region]
        state = f"moving {_way(entry.move)}" if entry.move else str(entry.state)
        error = ResidencyError(
            f"{party} {region} is {state}: {problem}"
            + (f"; its last move failed: {type(entry.cause).__name__}: {entry.cause}" if entry.cause else "")
        )
        error.__cause__ = entry.cause
        return error


def _way(move: Move) -> str:
    return f"from {move.source} to {move.target}"
