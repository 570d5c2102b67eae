"""The functions for tools and agents."""

from miles.config.multi_turn import AGENT, MULTI_TURN
from miles.rollout.generate_hub import CHECKS


def test_the_functions_are_checked_where_they_are_loaded():
    assert list(CHECKS) == [MULTI_TURN, AGENT]
