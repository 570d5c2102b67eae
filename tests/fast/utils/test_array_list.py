"""Lists of numbers that are arrays: they behave as the lists do."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from miles.utils.array_list import ArrayList, as_array

ENTRIES = {
    "ids": (np.int32, [3, 1, 2**31 - 1, 1]),
    "log-probabilities": (np.float32, [-0.5, 0.0, -3.25, -0.0]),
    "rows": (np.uint8, [[1, 2], [3, 4], [255, 0], [3, 4]]),
}


@pytest.fixture(params=ENTRIES.values(), ids=ENTRIES)
def pair(request):
    """A list, and the same as an array list."""
    dtype, plain = request.param
    return plain, ArrayList(np.array(plain, dtype))


def test_it_reads_as_a_list(pair):
    plain, ours = pair
    assert ours == plain and plain == ours and ours != plain[:3] and ours != [*plain[:3], None] and ours != None  # noqa: E711
    assert repr(ours) == repr(plain) and f"{ours}" == f"{plain}" and len(ours) == 4 and bool(ours) and not ours[:0]
    assert [*ours] == plain and [*reversed(ours)] == plain[::-1] and type(ours[-1]) is type(plain[-1])
    assert ours[2] in ours and ours.index(plain[1]) == 1 and ours.count(plain[0]) == plain.count(plain[0])
    for cut in (slice(1, 3), slice(None, None, -1), slice(5, 9)):
        assert ours[cut] == plain[cut] and type(ours[cut]) is ArrayList
    assert ours + plain == plain + plain and plain + ours == plain * 2 == ours * 2 and type(ours + plain) is ArrayList
    assert type(plain + ours) is list and ours * 0 == []
    assert json.dumps(ours.tolist()) == json.dumps(plain) and isinstance(ours, list)
    with pytest.raises(IndexError):
        ours[4]
    with pytest.raises(TypeError):
        ours + tuple(plain)
    with pytest.raises(TypeError):
        hash(ours)


def test_it_is_changed_as_a_list_is(pair):
    plain, ours = pair
    plain, kept, one = list(plain), ours.copy(), plain[1]
    for values in (plain, ours):
        values.append(one)
        values.extend([one, one])
        values += (one,)
        values.insert(0, one)
        values.insert(99, one)
        values[3] = values[-1] = one
        values[1:3] = [one] * 5
        del values[0], values[-2:]
        values.remove(one)
        values.reverse()
        assert values.pop() == one
    assert ours == plain and kept != plain
    ours.clear()
    ours.extend(plain)
    assert ours == plain


def test_copies_share_nothing(pair):
    plain, ours = pair
    for other in (copy.copy(ours), copy.deepcopy(ours), ours[:], pickle.loads(pickle.dumps(ours))):
        other[0] = plain[1]
        assert type(other) is ArrayList and other.array.dtype == ours.array.dtype
    assert ours == plain
    frozen = ours.copy()
    frozen.array.flags.writeable = False  # as what comes out of Ray's store
    frozen[0] = plain[1]
    assert frozen[0] == plain[1]


def test_it_takes_the_bytes_of_its_numbers():
    assert len(pickle.dumps(ArrayList(np.zeros(10_000, np.int8)))) < 10_300


def test_a_number_is_rounded_to_its_type_before_it_is_compared():
    ours = ArrayList(np.array([0.1], np.float32))
    assert ours == [0.1] and ours[0] == float(np.float32(0.1)) and ours != [0.11]


def test_code_that_wants_lists_takes_it(tiny_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    ids = tokenizer("rev 12")["input_ids"]
    ours = ArrayList(np.array(ids, np.int32))
    assert tokenizer.decode(ours) == tokenizer.batch_decode([ours, ours[:2]])[0] == "rev 12"
    assert (
        torch.tensor(ours).tolist() == ids and np.asarray(ours) is ours.array and (ours.array == np.array(ours)).all()
    )


def test_conversions():
    for values in (
        [1, 0],
        (1, 0),
        np.array([1.0, 0.0]),
        torch.tensor([1, 0]),
        torch.tensor([1, 0]).bfloat16(),
        [True, 0],
    ):
        assert as_array(values, "x", np.int8).tolist() == [1, 0]
    same = np.zeros(3, np.float32)
    assert as_array(same, "x", np.float32) is same and as_array([], "x", np.int8).shape == (0,)
    assert as_array([], "x", np.int8, ("layers", "k")).shape == (0, 0, 0)
    for values in ("12", None, 3, {1: 2}, [[1]], [1, [2]], [None], [1.5], [128], [-129], [float("nan")], [1, "a"], {1}):
        with pytest.raises(ValueError, match="^x = .*; it must be a list of integers from -128 to 127$"):
            as_array(values, "x", np.int8)
    with pytest.raises(ValueError, match=r"numbers, each entry of the shape \[layers\]"):
        as_array([1.0], "x", np.float32, ("layers",))
