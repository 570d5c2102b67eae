"""GLM-4."""

from transformers import Glm4Config

from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests

GLM4 = SIZES | dict(num_hidden_layers=2, head_dim=32, pad_token_id=None)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CASES = {
    "bias": Glm4Config(**GLM4, rope_parameters=ROPE | {"partial_rotary_factor": 0.5}),
    "tied": Glm4Config(**GLM4, attention_bias=False, rms_norm_eps=1e-5, tie_word_embeddings=True),
}
CONTROLS = {
    "all of each head rotated": ("bias", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
    "another rope": ("bias", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "rope_theta": 1e5}}),
    "another epsilon": ("tied", {"rms_norm_eps": 1e-2}),
}
REFUSED = [
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8' without weight_block_size"),
    ({"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
]
FAMILY = FamilyTests(
    cases=CASES,
    slow_layouts=("pp2", "cp2"),
    controls=CONTROLS,
    refused=[(Glm4Config(**GLM4 | changes, architectures=["Glm4ForCausalLM"]), named) for changes, named in REFUSED],
)
