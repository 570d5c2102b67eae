"""--rollout-data-postprocess-path: what it is given, and what it may replace."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles.training.data_postprocess import postprocessed
from tests.fast.training.micro_batches import make_batch

MASKS = [[1, 1], [0, 1, 1]]


@pytest.fixture
def apply(monkeypatch, tmp_path):
    """Calls `postprocessed` with a function that it is given."""
    (tmp_path / "postprocess_of_mine.py").write_text("def function(*arguments): return chosen(*arguments)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import postprocess_of_mine

    config = SimpleNamespace(rollout_data_postprocess_path="postprocess_of_mine.function")

    def call(function, **columns):
        postprocess_of_mine.chosen = function
        return postprocessed(config, 3, make_batch(MASKS), columns)

    call.config = config
    return call


def test_no_function_changes_nothing():
    config = SimpleNamespace(rollout_data_postprocess_path=None)
    assert postprocessed(config, 0, make_batch(MASKS), {"advantages": torch.ones(5)}) == {}


def test_what_it_returns_replaces_and_what_it_does_to_its_copies_does_not(apply):
    advantages, log_probs = torch.arange(5.0), torch.arange(5.0)

    def function(config, rollout_id, batch, columns):
        assert config is apply.config and rollout_id == 3 and batch["loss_masks"].tolist() == [1, 1, 0, 1, 1]
        assert set(columns) == {"advantages", "old_log_probs"}
        columns["old_log_probs"].zero_()
        return {"advantages": columns["advantages"].double().mul_(2).requires_grad_()}

    replaced = apply(function, advantages=advantages, old_log_probs=log_probs)
    assert list(replaced) == ["advantages"]
    assert replaced["advantages"].dtype == torch.float32 and not replaced["advantages"].requires_grad
    assert replaced["advantages"].tolist() == [0, 2, 4, 6, 8]
    assert advantages.tolist() == log_probs.tolist() == [0, 1, 2, 3, 4]


def test_none_changes_nothing(apply):
    assert apply(lambda *_: None, advantages=torch.ones(5)) == {}


def test_masked_tokens_may_hold_anything(apply):
    values = torch.tensor([1, 1, torch.nan, 1, 1])
    assert apply(lambda *_: {"advantages": values}, advantages=torch.ones(5))["advantages"][2].isnan()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(5), "returned Tensor; it must return None or a dict of columns"),
        ({"loss_masks": torch.ones(5)}, "returned 'loss_masks'; it may return advantages"),
        ({"advantages": torch.ones(4)}, "returned advantages of shape \\(4,\\); it must be a tensor of \\(5,\\)"),
        ({"advantages": np.ones(5)}, "returned advantages ndarray; it must be a tensor"),
        ({"advantages": torch.tensor([1, 1, 1, 1, torch.inf])}, "returned advantages with values at trainable"),
    ],
)
def test_refused(apply, result, message):
    with pytest.raises(ValueError, match=f"--rollout-data-postprocess-path {message}"):
        apply(lambda *_: result, advantages=torch.ones(5))


def test_a_function_that_fails_is_named(apply):
    def fails(*_):
        raise KeyError("boom")

    with pytest.raises(RuntimeError, match="--rollout-data-postprocess-path .*function failed: KeyError: 'boom'"):
        apply(fails, advantages=torch.ones(5))
