"""In which order an epoch takes the prompts of one or several files."""

import random
from array import array
from collections.abc import Sequence


def prompts_per_epoch(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """How many prompts an epoch takes from each file.

    Without weights each file is taken once. With weights an epoch has as many prompts as all files together, and each
    file has its share of them, by largest remainder.
    """
    if weights is None:
        return list(sizes)
    total = sum(sizes)
    shares = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda file: counts[file] - shares[file])
    for file in by_remainder[: total - sum(counts)]:
        counts[file] += 1
    return counts


def epoch_order(sizes: Sequence[int], weights: Sequence[float] | None, seed: int | None, epoch: int) -> Sequence[int]:
    """The prompts of epoch `epoch`, counted through all files; the same arguments give the same order.

    Without weights every prompt once: file by file, or with a seed shuffled by `seed + epoch`. With weights each file
    is gone through pass after pass, across epochs, so that none of its prompts comes again before all others came; with
    a seed each pass and the epoch are shuffled, else the files are interleaved evenly.

    Args:
        sizes: prompts of each file.
        weights: shares of the files in an epoch, of any sum.
        seed: None: no shuffle.
        epoch: from 0.
    """
    if weights is None:
        order: array[int] = array("Q", range(sum(sizes)))
    else:
        order = _mixed(sizes, prompts_per_epoch(sizes, weights), seed, epoch)
    if seed is not None:
        random.Random(seed + epoch).shuffle(order)
    return order


def _mixed(sizes: Sequence[int], counts: Sequence[int], seed: int | None, epoch: int) -> "array[int]":
    places: list[tuple[float, int, int]] = []
    first = 0
    for file, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        rows = _rows_of_file(size, count, epoch, None if seed is None else f"{seed} {file}")
        places += (((place + 0.5) / count, file, first + row) for place, row in enumerate(rows))
        first += size
    places.sort()
    return array("Q", (row for _, _, row in places))


def _rows_of_file(size: int, count: int, epoch: int, seed: str | None) -> Sequence[int]:
    """Rows `epoch * count` to `(epoch + 1) * count` of an endless row of passes over the file."""
    start = epoch * count
    first_pass, last_pass = start // size, (start + count - 1) // size
    rows = array("Q")
    for number in range(first_pass, last_pass + 1):
        one_pass = array("Q", range(size))
        if seed is not None:
            random.Random(f"{seed} {number}").shuffle(one_pass)
        rows += one_pass
    return rows[start - first_pass * size :][:count]
