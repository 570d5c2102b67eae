"""Which parts of a layer's specification Transformer Engine takes over. Its layers themselves need a GPU."""

import pytest
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.megatron_utils.parts import specs
from miles.backends.megatron_utils.parts.attention import AttentionOptions, PackedAttention
from miles.backends.megatron_utils.parts.experts import GroupedExperts
from miles.backends.megatron_utils.parts.norms import RMSNorm
from miles.backends.megatron_utils.parts.transformer_engine import EngineAttention, replaced, require


class Column: ...


class Row: ...


class Experts: ...


class OwnRow(RowParallelLinear): ...


CLASSES = {
    ColumnParallelLinear: Column,
    RowParallelLinear: Row,
    PackedAttention: EngineAttention,
    GroupedExperts: Experts,
}
CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, qk_layernorm=True)
OPTIONS = AttentionOptions(window=3)


def test_dense_layer():
    spec = specs.dense_layer(CONFIG, OPTIONS)
    before = repr(spec)
    attention = replaced(spec, CLASSES).submodules.self_attention.submodules
    assert (attention.linear_qkv, attention.linear_proj) == (Column, Row)
    assert attention.core_attention.module is EngineAttention and attention.core_attention.params == {
        "options": OPTIONS
    }
    assert attention.q_layernorm is RMSNorm
    mlp = replaced(spec, CLASSES).submodules.mlp.keywords["submodules"]
    assert (mlp.linear_fc1, mlp.linear_fc2) == (Column, Row)
    assert replaced(spec, CLASSES).submodules.sharded_state_dict_keys_map == spec.submodules.sharded_state_dict_keys_map
    assert repr(spec) == before


def test_experts():
    mlp = replaced(specs.moe_layer(CONFIG), CLASSES).submodules.mlp.keywords["submodules"]
    linears = mlp.shared_experts.keywords["submodules"]
    assert (linears.linear_fc1, linears.linear_fc2) == (Column, Row)
    assert mlp.experts is Experts


def test_a_familys_own_linear_layers_stay():
    layer = replaced(specs.dense_layer(CONFIG, row=OwnRow), CLASSES).submodules
    assert layer.self_attention.submodules.linear_proj is OwnRow
    assert layer.mlp.keywords["submodules"].linear_fc2 is OwnRow


def test_says_what_is_missing():
    with pytest.raises(ValueError, match="needs the package transformer-engine, which is not installed: pip install"):
        require()
