"""--data-source-path: a class of the user's own gives the prompts, and what it gives is checked."""

from types import SimpleNamespace

import pytest

from miles.rollout.prompts.data_source import DataSource, RolloutDataSource, load_data_source, take_groups
from miles.utils.types import Sample

SOURCE = """
from miles.rollout.prompts.data_source import DataSource

def two(config, tokenizer): ...

class Source(DataSource):
    longest_prompt = 3
    def __init__(self, config, tokenizer): self.given = config, tokenizer
    def get_samples(self, num_groups): return []
    def state_dict(self): return {}
    def load_state_dict(self, state): ...
    def __len__(self): return 0
"""


@pytest.fixture
def config(engine_config):
    return engine_config.model_copy(update={"rollout_batch_size": 2, "n_samples_per_prompt": 2})


def test_a_class_of_the_users_own(config, monkeypatch, tmp_path):
    (tmp_path / "source_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    changed = config.model_copy(update={"data_source_path": "source_of_mine.Source", "prompt_data": None})
    source = load_data_source(changed, "tokenizer")
    assert isinstance(source, DataSource) and source.given == (changed, "tokenizer")
    with pytest.raises(ValueError, match="--data-source-path .*two is of type function; it must be a class derived"):
        load_data_source(config.model_copy(update={"data_source_path": "source_of_mine.two"}), "tokenizer")
    # Miles' own can be derived from.
    assert issubclass(RolloutDataSource, DataSource)


def pending(index, group_index, **changes):
    sample = Sample(group_index, index, tokens=[1, 2])
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [[pending(0, 0), pending(1, 0)]],
            "returned groups of [2] samples; it must return 2 groups of --n-samples-per",
        ),
        ([[pending(0, 0), pending(1, 0)], [pending(2, 1)]], "returned groups of [2, 1] samples"),
        ([[pending(0, 0), pending(1, 1)], [pending(2, 1), pending(3, 1)]], "must share one group_index of their own"),
        ([[pending(0, 0), pending(1, 0)], [pending(2, 0), pending(3, 0)]], "two groups have one group_index"),
        ([[pending(0, 0), pending(1, 0)], [pending(2, 1), pending(None, 1)]], "returned a sample with index None"),
        ([[pending(0, 0), pending(1, 0)], [pending(2, 1, tokens=[]), pending(3, 1)]], "0 tokens and status pending"),
        (
            [[pending(0, 0), pending(1, 0)], [pending(2, 1, status=Sample.Status.COMPLETED), pending(3, 1)]],
            "returned a sample with index 2, 2 tokens and status completed",
        ),
    ],
)
def test_what_it_gives_is_checked(config, groups, message):
    with pytest.raises(ValueError) as caught:
        take_groups(config, SimpleNamespace(get_samples=lambda num_groups: groups), 2)
    assert message in str(caught.value)


def test_an_error_of_it_is_named_as_its_own(config):
    def fails(num_groups):
        raise ValueError("boom")

    source = SimpleNamespace(get_samples=fails)
    with pytest.raises(RuntimeError, match="--data-source-path a.B failed: ValueError: boom"):
        take_groups(config.model_copy(update={"data_source_path": "a.B"}), source, 2)
    with pytest.raises(ValueError, match="^boom$"):
        take_groups(config, source, 2)


def test_good_groups_are_taken(config):
    groups = [[pending(0, 0), pending(1, 0)], [pending(2, 1), pending(3, 1)]]
    assert take_groups(config, SimpleNamespace(get_samples=lambda num_groups: groups), 2) is groups
