"""Finished samples for tests, and hooks that return whatever they are told."""

from miles.utils.types import Sample
from miles.utils.user_code import guarded


def finished(index, group_index, reward=1.0, **changes):
    sample = Sample(group_index, index, tokens=[1, 2, 3, 4], response_length=2, reward=reward, loss_mask=[1, 1])
    sample.rollout_log_probs = [-0.5, -0.25]
    sample.status = Sample.Status.COMPLETED
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def two_groups():
    return [[finished(0, 0), finished(1, 0, 0.0)], [finished(2, 1, 0.0), finished(3, 1, 0.0)]]


def four_samples():
    return [sample for group in two_groups() for sample in group]


def awaited(function):
    """A whole-rollout function as `load_hooks` makes it."""
    return guarded("--flag my.function", function, in_thread=True)


def returning(value):
    """A hook that returns `value`, whatever it is called with."""
    return lambda *arguments, **keywords: value
