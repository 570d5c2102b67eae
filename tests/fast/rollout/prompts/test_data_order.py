from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.prompts.data_order import epoch_order, prompts_per_epoch


def orders(sizes, weights, seed, epochs):
    return [list(epoch_order(sizes, weights, seed, epoch)) for epoch in range(epochs)]


def test_without_weights_every_prompt_once_an_epoch():
    assert orders([3, 2], None, None, 2) == [[0, 1, 2, 3, 4]] * 2
    first, second = orders([3, 2], None, 1, 2)
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4] and first != second
    assert orders([3, 2], None, 1, 2) == [first, second] != orders([3, 2], None, 5, 2)


def test_weights_interleave_evenly_and_go_on_where_the_last_epoch_stopped():
    assert orders([4, 4], [3, 1], None, 3) == [
        [0, 1, 4, 2, 3, 0, 5, 1],
        [2, 3, 6, 0, 1, 2, 7, 3],
        [0, 1, 4, 2, 3, 0, 5, 1],
    ]


def test_each_pass_over_a_file_is_shuffled_anew():
    def halves(seed):
        """Which of the first file's 20 prompts come in the first half of each pass."""
        return [{row for row in epoch if row < 20} for epoch in orders([20, 20], [1, 3], seed, 6)[::2]]

    first, second, third = halves(1)
    assert len(first) == len(second) == len(third) == 10
    assert first != second != third != first
    assert halves(1) == [first, second, third] and halves(2)[0] != first


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [
        ([4, 4], None, [4, 4]),
        ([10, 90], [1, 1], [50, 50]),
        ([10, 90], [0.1, 0.9], [10, 90]),
        ([5, 5], [2, 1], [7, 3]),
        ([1, 1, 1], [1, 1, 1], [1, 1, 1]),
        ([5, 6], [10, 1.9], [9, 2]),  # 9.24 and 1.76
        ([2, 2], [1, 1000], [0, 4]),
    ],
)
def test_shares(sizes, weights, counts):
    assert prompts_per_epoch(sizes, weights) == counts


FILES = st.lists(st.tuples(st.integers(1, 12), st.floats(0.2, 5)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(FILES, st.none() | st.integers(0, 5))
def test_a_prompt_never_comes_again_before_all_others_of_its_file(files, seed):
    sizes, weights = zip(*files, strict=True)
    counts = prompts_per_epoch(sizes, weights)
    assert sum(counts) == sum(sizes)
    drawn = Counter()
    for epoch in orders(sizes, weights, seed, 5):
        assert len(epoch) == sum(sizes)
        drawn.update(epoch)
        first = 0
        for size, count in zip(sizes, counts, strict=True):
            times = [drawn[row] for row in range(first, first + size)]
            assert max(times) - min(times) <= 1
            assert sum(times) % max(count, 1) == 0
            first += size
    assert orders(sizes, weights, seed, 5) == orders(sizes, weights, seed, 5)
