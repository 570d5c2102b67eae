"""config.json as transformers completes it."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from miles.utils.errors import UserError


def load_hf_config(folder: str | Path) -> PreTrainedConfig:
    """Read `folder`/config.json. Raises ValueError where there is none.

    Of a model that sees as well, it is the language model's configuration, with the whole model's architectures.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: give the local folder of a Hugging Face checkpoint")
    whole = AutoConfig.from_pretrained(folder)
    text = whole.get_text_config()
    if text is not whole:
        text.architectures, text.tie_word_embeddings = whole.architectures, whole.tie_word_embeddings
        quantization = whole.to_dict().get("quantization_config")
        if quantization is not None:
            text.quantization_config = quantization
    return text
