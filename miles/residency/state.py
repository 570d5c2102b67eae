"""Where each region is at the moment, and which changes are legal: one table for all parties, which the driver keeps.

No call goes out for a move that the table refuses: torch_memory_saver would end the process, and SGLang's server too. A
party knows only how far its last moves came, so that it makes none twice.
"""

from collections.abc import Mapping

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


class ResidencyError(RuntimeError):
    """A region is not where a caller needs it. The message names party, region, where it is and the caller."""


class RegionTable:
    """The place of each region; every change goes through a move that begins and then finishes.

    Args:
        places: where each region is at the start, see `miles.residency.plan.start`.
    """

    def __init__(self, places: Mapping[tuple[Party, Region], Place]):
        self._places: dict[tuple[Party, Region], Place | Move] = dict(places)

    def place(self, party: Party, region: Region) -> Place | Move:
        """Where a region is, or the move of it that has begun and not finished."""
        return self._places[party, region]

    def begin(self, move: Move, caller: str) -> None:
        """The move begins: until it finishes the region is nowhere.

        A region that is already moving may begin the same move again: what moves it makes no move twice.

        Args:
            caller: who wants to move it, for the error.

        Raises:
            ResidencyError: the region is not at the move's source, is in the middle of another move, or may never go
                where the move wants it.
        """
        away = move.target if move.leaves else move.source
        if Place.GPU not in (move.source, move.target) or away not in AWAY[move.party, move.region]:
            raise self._error(move.party, move.region, f"{caller} wants to move it {_way(move)}, which is never legal")
        if self._places[move.party, move.region] not in (move.source, move):
            raise self._error(move.party, move.region, f"{caller} wants to move it {_way(move)}")
        self._places[move.party, move.region] = move

    def finish(self, move: Move) -> None:
        """The move is complete: the region is at its target."""
        if self._places[move.party, move.region] != move:
            raise self._error(move.party, move.region, f"the end of its move {_way(move)}, which has not begun")
        self._places[move.party, move.region] = move.target

    def require(self, party: Party, region: Region, place: Place, caller: str) -> None:
        """Raise unless the region rests at `place`.

        Raises:
            ResidencyError: it is elsewhere or moving; `caller` is who needs it.
        """
        if self._places[party, region] != place:
            raise self._error(party, region, f"{caller} needs it {place}")

    def _error(self, party: Party, region: Region, problem: str) -> ResidencyError:
        place = self._places[party, region]
        where = f"moving {_way(place)}" if isinstance(place, Move) else place
        return ResidencyError(f"{party} {region} is {where}: {problem}")


def _way(move: Move) -> str:
    return f"from {move.source} to {move.target}"
