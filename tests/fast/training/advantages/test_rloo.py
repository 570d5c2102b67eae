import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.training.advantages.groups import shape_rewards
from miles.training.advantages.rloo import RLOO


def test_two_groups_by_hand():
    """3 against the others' (0 + 6) / 2 = 3; 0 against 4.5; 6 against 1.5; and 1 against 2, 2 against 1."""
    shaped = shape_rewards(RLOO, [3.0, 0.0, 6.0, 1.0, 2.0], [5, 5, 5, 1, 1], range(5), std=True)
    assert shaped.tolist() == [0, -4.5, 4.5, -1, 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 4)), min_size=1, max_size=20), st.booleans())
def test_against_the_mean_of_the_others(members, std):
    rewards, groups = zip(*members, strict=True)
    expected = []
    for i, (reward, group) in enumerate(members):
        others = [r for j, (r, g) in enumerate(members) if g == group and j != i]
        expected.append(reward - np.mean(others) if others else 0.0)
    shaped = shape_rewards(RLOO, rewards, groups, range(len(rewards)), std=std)
    np.testing.assert_allclose(shaped, expected, rtol=1e-5, atol=1e-5)
