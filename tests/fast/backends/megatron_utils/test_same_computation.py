"""Weights are swapped into a model only where they mean the same computation."""

import pytest

from miles.backends.megatron_utils.same_computation import check_same_computation
from miles.hf.config import load_hf_config


def test_weights_of_a_model_that_computes_otherwise_are_refused(tiny_checkpoint):
    own, other = load_hf_config(tiny_checkpoint), load_hf_config(tiny_checkpoint)
    check_same_computation("--ref-load", "other", own, other)
    other.rms_norm_eps = 0.1
    other.rope_parameters = other.rope_parameters | {"rope_theta": 100.0}
    with pytest.raises(ValueError, match="model in other .--opd-teacher-load. .* in layernorm_epsilon, ropes;"):
        check_same_computation("--opd-teacher-load", "other", own, other)
