import math

import pytest
import torch

from miles.training.advantages.responses import Responses

OFFSETS = torch.tensor([0, 4, 4, 8, 10])
MASK = torch.tensor([True, True, False, True, False, True, True, False, False, False])


def test_trainable_tokens_of_a_sample_in_order():
    """Sample 1 is empty, sample 3 fully masked."""
    responses = Responses(OFFSETS, MASK)
    assert responses.sample_m.tolist() == [0, 0, 0, 2, 2]
    assert responses.left_m.tolist() == [3, 2, 1, 2, 1]
    assert responses.spread(torch.tensor([1.0, math.nan, 2.0, math.nan])).tolist() == [1, 1, 1, 2, 2]


def test_the_last_token_and_the_following_one():
    responses = Responses(OFFSETS, MASK)
    last = responses.at_last(torch.tensor([1.0, math.nan, 2.0, math.nan]))
    assert last.dtype == torch.float64 and last.tolist() == [0, 0, 1, 0, 2]
    assert responses.following(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [2, 3, 0, 5, 0]


def test_select_reads_and_place_writes_only_trainable_tokens():
    responses = Responses(OFFSETS, MASK)
    x_n = torch.where(MASK, torch.arange(10.0), math.nan)
    selected = responses.select(x_n)
    assert selected.dtype == torch.float64 and selected.tolist() == [0, 1, 3, 5, 6]
    placed = responses.place(selected)
    assert placed.dtype == torch.float32 and placed.tolist() == [0, 1, 0, 3, 0, 5, 6, 0, 0, 0]


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_discounted_sums_by_hand(discount):
    responses = Responses(OFFSETS, MASK)
    sums = responses.discounted_sums(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64), discount)
    assert sums.tolist() == {0.0: [1, 2, 4, 8, 16], 0.5: [3, 4, 4, 16, 16], 1.0: [7, 6, 4, 24, 16]}[discount]


def test_discounted_sums_leave_their_argument_alone():
    x_m = torch.ones(5, dtype=torch.float64)
    Responses(OFFSETS, MASK).discounted_sums(x_m, 1.0)
    assert x_m.tolist() == [1] * 5


def test_an_infinity_stays_in_its_sample():
    responses = Responses(torch.tensor([0, 3, 6]), torch.ones(6, dtype=torch.bool))
    x_m = torch.tensor([1.0, 2.0, 3.0, math.inf, math.nan, 1.0], dtype=torch.float64)
    assert responses.discounted_sums(x_m, 0.5)[:3].tolist() == [2.75, 3.5, 3]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33])
def test_every_length_is_summed_to_its_end(length):
    responses = Responses(torch.tensor([0, length, 2 * length]), torch.ones(2 * length, dtype=torch.bool))
    sums = responses.discounted_sums(torch.ones(2 * length, dtype=torch.float64), 1.0)
    assert sums.tolist() == [*range(length, 0, -1)] * 2


@pytest.mark.parametrize("discount", [0.05, 0.9, 0.999, 1.0])
def test_a_hundred_thousand_tokens_in_closed_form(discount):
    """sum of discount^k is (1 - discount^left) / (1 - discount), whatever the size of discount^100000."""
    length = 100_000
    responses = Responses(torch.tensor([0, length]), torch.ones(length, dtype=torch.bool))
    sums = responses.discounted_sums(torch.ones(length, dtype=torch.float64), discount)
    left = torch.arange(length, 0, -1, dtype=torch.float64)
    expected = left if discount == 1 else (1 - discount**left) / (1 - discount)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)


def test_no_tokens_at_all():
    responses = Responses(torch.tensor([0, 0]), torch.zeros(0, dtype=torch.bool))
    assert responses.discounted_sums(responses.select(torch.zeros(0)), 0.9).shape == (0,)


def test_offsets_and_columns_must_fit():
    with pytest.raises(AssertionError):
        Responses(torch.tensor([0, 3]), MASK)
    with pytest.raises(AssertionError):
        Responses(torch.tensor([0, 6, 4, 10]), MASK)
    with pytest.raises(AssertionError):
        Responses(OFFSETS, MASK.int())
    with pytest.raises(AssertionError, match="values for 4 samples"):
        Responses(OFFSETS, MASK).spread(torch.zeros(3))
    with pytest.raises(AssertionError, match="values for 10 response tokens"):
        Responses(OFFSETS, MASK).select(torch.zeros(9))
