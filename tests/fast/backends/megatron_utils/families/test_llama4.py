"""Llama 4's language model in the checkpoint of the whole model."""

from transformers import Llama4Config, Llama4ForConditionalGeneration

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.hf_weights import check_names_and_shapes
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from tests.fast.backends.megatron_utils.families.data.llama4 import CASES


def test_the_whole_models_checkpoint_without_what_sees(tmp_path):
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    whole = Llama4Config(
        text_config=CASES["experts"].to_dict(),
        vision_config=vision | dict(vision_output_dim=32, projector_input_dim=32, projector_output_dim=32),
    )
    Llama4ForConditionalGeneration(whole).save_pretrained(tmp_path)
    hf_config = load_hf_config(tmp_path)
    family, index = family_for(hf_config), CheckpointIndex(tmp_path)
    entries = family.entries(hf_config, range(2), True, True)
    check_names_and_shapes(index, entries, family, hf_config)
    assert {name.split(".")[0] for name in index.files} == {"language_model", "vision_model", "multi_modal_projector"}
    ours = {name for entry in entries for name in entry.hf_names}
    assert ours == {name for name in index.files if name.startswith("language_model.")}
