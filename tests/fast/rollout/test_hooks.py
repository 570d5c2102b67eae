"""The function of each step: Miles' own, or the user's."""

import pytest

from miles.rollout.generate import EachAlone
from miles.rollout.hooks import Hooks, load_generate, load_hooks

LOADED = """
def takes(*names, waits=False):
    exec(f"{'async ' if waits else ''}def function({', '.join(names)}): return {names!r}")
    return locals()["function"]

rollout = takes("config", "rollout_id", "data_source", "evaluation=False")
rollout_waits = takes("config", "rollout_id", "data_source", "evaluation=False", waits=True)
two = takes("config", "samples")
three = takes("config", "groups", "data_source")
four = takes("config", "rollout_id", "buffer", "num_groups")
log = takes("rollout_id", "config", "samples", "metrics", "seconds")
generate = takes("config", "sample", "sampling_params", waits=True)
generate_at_once = takes("config", "sample", "sampling_params")
"""
# Field of the configuration, field of Hooks, a right function, a wrong one, what is said of it.
FLAGS = [
    ("rollout_function_path", "rollout", "rollout", "two", "must take (config, rollout_id, data_source, evaluation=)"),
    ("rollout_function_path", "rollout", "rollout_waits", "four", "must take (config, rollout_id, data_source, eval"),
    ("eval_function_path", "evaluate", "rollout", "two", "must take (config, rollout_id, data_source, evaluation=)"),
    ("custom_generate_function_path", "generate", "generate", "generate_at_once", "must be an async function"),
    ("custom_reward_post_process_path", "shape_rewards", "two", "four", "must take (config, samples)"),
    ("custom_convert_samples_to_train_data_path", "make_batch", "two", "generate", "must not be an async function"),
    ("dynamic_sampling_filter_path", "keep_group", "two", "three", "must take (config, samples)"),
    ("buffer_filter_path", "take_from_buffer", "four", "two", "must take (config, rollout_id, buffer, num_groups)"),
    ("rollout_sample_filter_path", "filter_samples", "two", "three", "must take (config, groups)"),
    ("rollout_all_samples_process_path", "show_all_samples", "three", "two", "must take (config, groups, data_source)"),
    ("custom_rollout_log_function_path", "log_rollout", "log", "two", "must take (rollout_id, config, samples, metric"),
    ("custom_eval_rollout_log_function_path", "log_eval", "four", "two", "must take (rollout_id, config, data, metri"),
]


@pytest.fixture
def mine(monkeypatch, tmp_path):
    (tmp_path / "functions_of_mine.py").write_text(LOADED)
    monkeypatch.syspath_prepend(tmp_path)
    return "functions_of_mine"


@pytest.fixture
def config(engine_config):
    """Two groups of two samples, trained as GRPO does."""
    changes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "advantage_estimator": "grpo"}
    return engine_config.model_copy(update=changes)


def function_of(step):
    """The user's, in a step of a rollout."""
    _, function = (step.function if isinstance(step, EachAlone) else step).args
    return function


# Loading


@pytest.mark.parametrize(("field", "hook", "right", "wrong", "message"), FLAGS)
def test_each_is_loaded_and_checked(config, mine, field, hook, right, wrong, message):
    assert load_hooks(config, None) == Hooks()
    hooks = load_hooks(config.model_copy(update={field: f"{mine}.{right}"}), None)
    assert function_of(getattr(hooks, hook)).__module__ == mine
    own = Hooks()
    assert [name for name in Hooks.__dataclass_fields__ if getattr(hooks, name) != getattr(own, name)] == [hook]
    with pytest.raises(ValueError) as caught:
        load_hooks(config.model_copy(update={field: f"{mine}.{wrong}"}), None)
    assert f"--{field.replace('_', '-')} {mine}.{wrong}" in str(caught.value)
    assert message in str(caught.value)


def test_every_hook_is_loaded_from_a_flag():
    assert {hook for _, hook, *_ in FLAGS} == set(Hooks.__dataclass_fields__)


def test_the_trainers_function_is_checked_before_anything_starts(config, mine):
    changed = config.model_copy(update={"rollout_data_postprocess_path": f"{mine}.two"})
    with pytest.raises(
        ValueError, match="--rollout-data-postprocess-path .* must take \\(config, rollout_id, batch, c"
    ):
        load_hooks(changed, None)


def test_a_generate_function_of_another_flag_is_named_by_it(config, mine):
    assert function_of(load_generate(config, None, f"{mine}.generate", "the set aime")).__module__ == mine
    with pytest.raises(ValueError, match="the set aime functions_of_mine.two must be an async function"):
        load_generate(config, None, f"{mine}.two", "the set aime")


def test_miles_own_generate_functions_look_at_the_configuration(config, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "miles.rollout.hooks.CHECKS", {"miles.rollout.generate.generate": lambda *given: asked.append(given)}
    )
    load_generate(config, "tokenizer", "miles.rollout.generate.generate")
    assert asked == [(config, "tokenizer")]
