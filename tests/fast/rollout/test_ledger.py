import pytest

from miles.rollout.ledger import Ledger, Outcome
from miles.tracking.metrics import describe
from miles.utils.types import Sample


def group(index):
    return [Sample(group_index=index)]


def test_every_outcome_has_a_count_with_a_description():
    ledger = Ledger()
    for index, outcome in enumerate(Outcome):
        ledger.take(group(index), new=True)
        ledger.settle(group(index), outcome)
    ledger.take(group(99), new=True)
    metrics = ledger.close(running=[99], stored=3)
    assert metrics == {
        "rollout/groups/new": 8,
        "rollout/groups/from_buffer": 0,
        "rollout/groups/in_flight": 1,
        **{f"rollout/groups/{outcome}": 1 for outcome in Outcome},
    }
    assert all(describe(name) for name in metrics)
    ledger.settle(group(99), Outcome.TRAINED)
    assert ledger.close(running=[], stored=3)["rollout/groups/trained"] == 1, "each rollout has its own counts"


def test_groups_of_a_loaded_state_count_as_received():
    ledger = Ledger()
    ledger.load(2)
    ledger.take(group(0), new=False)
    ledger.settle(group(0), Outcome.TRAINED)
    assert ledger.close(running=[], stored=1)["rollout/groups/from_buffer"] == 1


def test_a_group_that_is_worked_on_is_not_taken_again():
    ledger = Ledger()
    ledger.take(group(7), new=True)
    with pytest.raises(ValueError, match="handed out group_index 7 twice"):
        ledger.take(group(7), new=True)


@pytest.mark.parametrize("outcome", Outcome)
def test_one_outcome_each(outcome):
    ledger = Ledger()
    ledger.take(group(0), new=True)
    ledger.settle(group(0), outcome)
    with pytest.raises(KeyError):
        ledger.settle(group(0), outcome)


@pytest.mark.parametrize(
    ("running", "stored"),
    [([], 1), ([1, 1], 1), ([2], 1), ([1], 0), ([1], 2)],
    ids=["not worked on", "worked on twice", "another", "lost from the buffer", "one too many in the buffer"],
)
def test_lost_or_doubled(running, stored):
    ledger = Ledger()
    for index in (0, 1):
        ledger.take(group(index), new=True)
    ledger.settle(group(0), Outcome.SURPLUS)
    with pytest.raises(RuntimeError, match="a group is lost or doubled"):
        ledger.close(running, stored)
