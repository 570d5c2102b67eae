"""The rows of one optimizer step, dealt to data-parallel ranks and cut into micro-batches.

Rows are places in the step, from 0; [rank][micro-batch] -> rows. A rank may hold one row less than another, and so have
fewer micro-batches; `schedule` fills it up.
"""

import heapq


def fixed_micro_batches(
    num_rows: int, dp_size: int, micro_batch_size: int, least: int, costs: list[float] | None
) -> list[list[list[int]]]:
    """Deals rows and cuts each rank's into micro-batches of `micro_batch_size`, the last one smaller.

    They are made smaller where there would be fewer than `least`, or fewer than on another rank.

    Args:
        costs: what each row costs: the dearest goes first, to the rank with the least so far. None deals in turn.
    """
    if costs is None:
        ranks = [list(range(rank, num_rows, dp_size)) for rank in range(dp_size)]
    else:
        ranks = [sorted(rows) for rows in deal(_dearest_first(costs), costs, dp_size)]
    most = max(map(len, ranks))
    size = min(micro_batch_size, max(1, most // least))
    count = max(least, -(most // -size))
    return [_cut(rows, size, min(count, len(rows))) for rows in ranks]


def token_micro_batches(
    lengths: list[int], dp_size: int, max_tokens: int, least: int, costs: list[float] | None
) -> list[list[list[int]]]:
    """Deals rows, dearest first, to the rank with the least so far, and packs each rank's first-fit-decreasing.

    The dearest micro-batches are then halved until a rank has as many as any other and `least`, or a row in each.

    Args:
        lengths: tokens of each row, none more than `max_tokens`.
        costs: what each row costs; None for its tokens.
    """
    costs = [float(length) for length in lengths] if costs is None else costs
    ranks = deal(_dearest_first(costs), costs, dp_size)
    bins = [_first_fit(sorted(rows, key=lambda row: -lengths[row]), lengths, max_tokens) for rows in ranks]
    count = max(least, *(len(rank) for rank in bins))
    parts = [_split(rank, costs, min(count, len(rows))) for rank, rows in zip(bins, ranks, strict=True)]
    return [[sorted(rows) for rows in rank] for rank in parts]


def _dearest_first(costs: list[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda row: -costs[row])


def deal(rows: list[int], costs: list[float], dp_size: int) -> list[list[int]]:
    """Each of `rows` goes to the rank with the lowest cost so far that has room; all take as many, or one more."""
    if dp_size == 1:
        return [rows]
    quota, extra = divmod(len(rows), dp_size)
    room = [quota + (rank < extra) for rank in range(dp_size)]
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    loads = [(0.0, rank) for rank in range(dp_size) if room[rank]]
    for row in rows:
        load, rank = loads[0]
        ranks[rank].append(row)
        if len(ranks[rank]) < room[rank]:
            heapq.heapreplace(loads, (load + costs[row], rank))
        else:
            heapq.heappop(loads)
    return ranks


def _cut(rows: list[int], size: int, count: int) -> list[list[int]]:
    """Chunks of `size` rows in order; where those aren't `count`, that many whose sizes differ by one at most."""
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    if len(chunks) == count:
        return chunks
    ends = [len(rows) * (i + 1) // count for i in range(count)]
    return [rows[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _first_fit(rows: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Each row goes into the first bin with room. A tree of the largest room below each node finds it in log(bins)."""
    # Two bins of a first-fit packing hold more than max_tokens together, which bounds their number.
    most_bins = min(len(rows), 2 * sum(lengths[row] for row in rows) // max_tokens + 1)
    leaves = 1 << max(most_bins - 1, 0).bit_length()
    room = [max_tokens] * (2 * leaves)
    bins: list[list[int]] = [[] for _ in range(leaves)]
    for row in rows:
        length, node = lengths[row], 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        bins[node - leaves].append(row)
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            largest = left if left > right else right
            if room[node] == largest:
                break
            room[node] = largest
    return [rows_ for rows_ in bins if rows_]


def _split(bins: list[list[int]], costs: list[float], count: int) -> list[list[int]]:
    """Halves the dearest bin, among those of several rows, until there are `count` bins."""
    done = [rows for rows in bins if len(rows) == 1]
    heap = [(-sum(costs[row] for row in rows), i, rows) for i, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    tiebreak = len(bins)
    while len(done) + len(heap) < count:
        _, _, rows = heapq.heappop(heap)
        # Rows are dearest first, so dealing them to the cheaper half balances the two.
        for half in _halves(rows, costs):
            tiebreak += 1
            if len(half) == 1:
                done.append(half)
            else:
                heapq.heappush(heap, (-sum(costs[row] for row in half), tiebreak, half))
    return done + [rows for _, _, rows in sorted(heap)]


def _halves(rows: list[int], costs: list[float]) -> tuple[list[int], list[int]]:
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0.0, 0.0]
    for row in rows:
        cheaper = int(loads[1] < loads[0])
        halves[cheaper].append(row)
        loads[cheaper] += costs[row]
    return halves
