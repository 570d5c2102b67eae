import pytest

from miles.ray.rollout.run_length import with_num_rollout


@pytest.fixture
def config(engine_config):
    return engine_config.model_copy(update={"num_rollout": None, "num_epoch": 2, "rollout_batch_size": 3})


def test_what_is_left_over_is_said(config, caplog):
    assert with_num_rollout(config, 10).num_rollout == 6
    (line,) = caplog.messages
    assert line == (
        "--num-epoch 2 of 10 prompts is 20 prompts, of which the run's 6 rollouts of --rollout-batch-size 3 train on "
        "18: the last 2 are left over; give --num-rollout 7 instead to train on them too"
    )


def test_epochs_are_not_cut_one_by_one(config, caplog):
    """Ten prompts leave one over in each of three epochs, which a rollout takes together with the next epoch's."""
    config = config.model_copy(update={"num_epoch": 3})
    assert with_num_rollout(config, 10).num_rollout == 10 and caplog.messages == []


def test_too_few_for_one_rollout(config):
    with pytest.raises(ValueError, match="is 2 prompts, fewer than one rollout takes: lower --rollout-batch-size 3"):
        with_num_rollout(config, 1)
