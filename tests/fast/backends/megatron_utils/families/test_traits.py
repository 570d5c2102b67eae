"""The table of traits, which is read without torch, says of each family what its Megatron model has."""

import pytest

from miles.backends.megatron_utils.families import FAMILIES
from miles.backends.megatron_utils.parts.norms import PlusOneNorm
from miles.hf.families.traits import TRAITS

FAMILY_OF = {architecture: family for family in FAMILIES for architecture in family.architectures}


def test_the_table_has_the_families():
    assert set(TRAITS) == set(FAMILY_OF)


@pytest.mark.parametrize("architecture", TRAITS)
def test_a_trait_is_the_familys(architecture):
    family, traits = FAMILY_OF[architecture], TRAITS[architecture]
    latent = family.config_class.__name__ == "MLATransformerConfig"
    assert traits.plus_one_norm == (family.final_norm is PlusOneNorm)
    assert traits.qk_norm == (family.qk_norm or latent)
    assert traits.qkv_bias == (family.qkv_bias or "has_qkv_bias" in vars(type(family)))
