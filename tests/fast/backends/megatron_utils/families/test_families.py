import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from miles.backends.megatron_utils.families import family_for

SIZES = dict(
    vocab_size=259,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ARCHITECTURES = {"llama": (LlamaConfig, {}), "qwen2": (Qwen2Config, {}), "qwen3": (Qwen3Config, {"head_dim": 16})}


def hf_config(name, **changes):
    kind, extra = ARCHITECTURES[name]
    title = name.capitalize() + "ForCausalLM"
    return kind(**{**SIZES, **extra, "tie_word_embeddings": False, "architectures": [title], **changes})


def random_weights(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return {name: value for name, value in model.state_dict().items() if not _is_tied_head(config, name)}


def _is_tied_head(config, name):
    return config.tie_word_embeddings and name == "lm_head.weight"


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_weight_goes_there_and_back_bit_equal(name, tied, tp_size):
    config = hf_config(name, tie_word_embeddings=tied)
    weights = random_weights(config)
    back = {}
    for entry in family_for(config).entries(config, range(3), True, True):
        assert tuple(tuple(weights[n].shape) for n in entry.hf_names) == entry.shapes
        shards = [entry.kind.split([weights[n] for n in entry.hf_names], rank, tp_size) for rank in range(tp_size)]
        back.update(zip(entry.hf_names, entry.kind.merge(shards), strict=True))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[n], weights[n]) for n in weights)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_together_have_every_tensor_once(tied):
    config = hf_config("qwen3", tie_word_embeddings=tied)
    family = family_for(config)
    whole = family.entries(config, range(3), True, True)
    stages = [family.entries(config, range(0, 2), True, False), family.entries(config, range(2, 3), False, True)]
    gathered = [name for stage in stages for entry in stage if not entry.load_only for name in entry.hf_names]
    assert sorted(gathered) == sorted(name for entry in whole for name in entry.hf_names)
    copies = [entry for stage in stages for entry in stage if entry.load_only]
    assert [(e.megatron_name, e.hf_names) for e in copies] == (
        [("output_layer.weight", ("model.embed_tokens.weight",))] if tied else []
    )
    assert [e.megatron_name for e in stages[1]][0] == "decoder.layers.0.input_layernorm.weight"


def test_model_settings():
    config = hf_config("llama", rope_parameters=LLAMA3_ROPE, max_position_embeddings=131072)
    family = family_for(config)
    assert family.gpt_kwargs(config) == dict(
        vocab_size=259, max_sequence_length=131072, share_embeddings_and_output_weights=False
    )
    qwen3 = hf_config("qwen3")
    settings = family_for(qwen3).transformer_config(qwen3)
    assert (settings["kv_channels"], settings["qk_layernorm"], settings["add_qkv_bias"]) == (16, True, False)
    qwen2 = hf_config("qwen2")
    settings = family_for(qwen2).transformer_config(qwen2)
    assert (settings["kv_channels"], settings["qk_layernorm"], settings["add_qkv_bias"]) == (4, False, True)


@pytest.mark.parametrize(
    "name, changes, named",
    [
        ("llama", dict(hidden_act="gelu"), "hidden_act='gelu'"),
        ("llama", dict(attention_bias=True), "attention_bias=True"),
        ("llama", dict(mlp_bias=True), "mlp_bias=True"),
        ("llama", dict(pretraining_tp=2), "pretraining_tp=2"),
        (
            "llama",
            dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type='dynamic'",
        ),
        ("qwen2", dict(layer_types=["full_attention", "chunked_attention", "full_attention"]), "chunked_attention"),
        ("qwen3", dict(attention_bias=True), "attention_bias=True"),
        ("qwen3", dict(quantization_config={"quant_method": "awq"}), "quant_method='awq' .AWQ, 4 bits. is not read"),
    ],
)
def test_what_megatron_cannot_express_is_refused_by_field_and_value(name, changes, named):
    with pytest.raises(ValueError, match=named):
        family_for(hf_config(name, **changes))


def test_all_refused_fields_are_named_at_once():
    with pytest.raises(ValueError, match="hidden_act='relu'.*mlp_bias=True"):
        family_for(hf_config("llama", hidden_act="relu", mlp_bias=True))


def test_an_unknown_architecture_is_refused_with_the_list():
    with pytest.raises(ValueError, match="MptForCausalLM.*supported: .*LlamaForCausalLM.*Qwen2ForCausalLM"):
        family_for(PreTrainedConfig(architectures=["MptForCausalLM"]))
    with pytest.raises(ValueError, match="architectures=None"):
        family_for(PreTrainedConfig())
