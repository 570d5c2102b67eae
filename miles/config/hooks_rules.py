"""What the flags of the user's own functions must satisfy. Whether they can be called is found out on loading them."""

from collections.abc import Iterator

from miles.config.hooks import HooksConfig
from miles.config.names import flag_of
from miles.config.paths import dotted_path_problem
from miles.config.values import Values

FILTERS = ("dynamic_sampling_filter_path", "buffer_filter_path")


def _dotted_paths(v: Values) -> Iterator[str]:
    for name in (*HooksConfig.model_fields, *FILTERS):
        path = getattr(v, name)
        if path is not None and (problem := dotted_path_problem(flag_of(name), path, "my_module.my_function")):
            yield problem


def _never_called(v: Values) -> Iterator[str]:
    """With --load-debug-rollout-data it is the command line of the run that saved, whose hooks need not be called."""
    of_samples = ("custom_generate_function_path", "custom_reward_post_process_path", *FILTERS)
    needs = (
        (v.learns_from_samples, "samples to learn from, not --loss-type sft_loss", of_samples),
        (v.learns_from_samples and v.needs_trainer, "a trainer with advantages", ("rollout_data_postprocess_path",)),
    )
    for met, what, names in needs:
        for name in names:
            if not met and getattr(v, name) is not None:
                yield f"{flag_of(name)} would never be called: it needs {what}; give that, or drop it"


def _rollout_function(v: Values) -> Iterator[str]:
    if v.rollout_function_path is None:
        return
    for name in FILTERS:
        if getattr(v, name) is not None:
            yield f"{flag_of(name)} would never be called: --rollout-function-path makes the whole rollout; drop one"


HOOKS_RULES = [_dotted_paths, _never_called, _rollout_function]
