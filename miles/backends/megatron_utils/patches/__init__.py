"""Faults of named versions of other libraries, cured one a file; each says when it can be deleted.

All of them but `process_groups`, which a trainer's sleep uses, are put in place by `install`.
"""

from miles.backends.megatron_utils.patches import (
    bucket_places,
    cpu_support,
    first_step,
    loaded_values,
    norms,
    shared_step,
    side_input,
)


def install(device: str) -> None:
    """Cure what concerns a process on `device` ("cpu" or "cuda"); before a model is built, any number of times."""
    if device == "cpu":
        cpu_support.install()
    else:
        norms.install()
    for patch in (bucket_places, first_step, loaded_values, shared_step, side_input):
        patch.install()
