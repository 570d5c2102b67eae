"""Writes a tiny Hugging Face checkpoint with random weights, a byte-level tokenizer and a chat template.

Ids 0 to 255 are the bytes; then come the special tokens. A turn reads <|user|>question<|assistant|>answer<|end|>.
"""

import json
from pathlib import Path
from typing import Any, Literal

from miles.tools import run
from miles.utils.errors import UserError

SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}{{ raise_exception('this template knows the roles user and assistant, not ' ~ message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_TOKENS = 256 + len(SPECIAL_TOKENS)


def byte_tokenizer() -> Any:
    """A fast tokenizer that spells any text byte by byte: id = byte, then SPECIAL_TOKENS. The end token is <|end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    assert tokenizer.get_vocab_size() == NUM_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|endoftext|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


# What else config.json says of a family. DeepSeek-V3: in published checkpoints, and read by SGLang; transformers does
# not know it. DeepSeek-V4: the smallest that SGLang's kernels take, with all kinds of layers in four.
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "deepseek_v4": {
        "partial_rotary_factor": 0.125,
        "q_lora_rank": 128,
        "o_groups": 8,
        "o_lora_rank": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "compress_ratios": [0, 0, 4, 128],
        "num_hash_layers": 3,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
}


def make_tiny_checkpoint(
    output: Path,
    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v4"] = "qwen3",
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 384,
    vocab_size: int = 264,
    max_position_embeddings: int = 2048,
    tie: bool = True,
    init_std: float = 0.02,
    fields: str = "{}",
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
) -> None:
    """Write a random checkpoint (config.json, model.safetensors, tokenizer, chat template, generation_config.json).

    Of deepseek_v4 SGLang's kernels take --num-heads 64 --head-dim 512 --hidden-size 512 --intermediate-size 256, and
    compress_ratios (of four layers) are among --fields.

    Args:
        output: folder to write; made if missing, its files are overwritten.
        family: architecture.
        hidden_size: width of the residual stream.
        num_layers: number of transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width of a head; qwen2 allows hidden_size / num_heads only.
        intermediate_size: width inside the MLP, of deepseek_v4 inside an expert.
        vocab_size: rows of the embedding, at least 261; the rows beyond the tokenizer's 261 tokens are padding.
        max_position_embeddings: longest sequence in tokens.
        tie: share input and output embedding.
        init_std: standard deviation of the random weights.
        fields: more of config.json as JSON, for example {"num_experts": 8} for qwen3_moe.
        dtype: type of the weights.
        seed: of the random weights.

    Raises: ValueError for sizes that contradict each other.
    """
    if vocab_size < NUM_TOKENS:
        raise UserError(f"--vocab-size {vocab_size}: the tokenizer needs at least {NUM_TOKENS} rows")
    if num_heads % num_kv_heads:
        raise UserError(f"--num-kv-heads {num_kv_heads} does not divide --num-heads {num_heads}")
    if family == "qwen2" and head_dim * num_heads != hidden_size:
        raise UserError(
            f"--head-dim {head_dim}: qwen2 allows only hidden-size / num-heads, {hidden_size / num_heads:g}"
        )
    if family == "deepseek_v4" and (num_kv_heads != 1 or tie):
        raise UserError(
            "deepseek_v4 has one key for all heads, and embeddings that are not tied: give --num-kv-heads 1 --no-tie"
        )

    more = json.loads(fields)
    if not isinstance(more, dict):
        raise UserError(f"--fields {fields}: give a JSON object")

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from miles.hf.deepseek_v4_hub import draw_experts, save_hub_checkpoint

    tokenizer = byte_tokenizer()
    settings = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tie,
        initializer_range=init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if family == "deepseek_v4":
        del settings["rope_parameters"]  # it has two, of fields of its own
        settings["moe_intermediate_size"] = settings.pop("intermediate_size")
    settings |= FAMILY_FIELDS.get(family, {})
    if family not in ("qwen2", "deepseek_v3"):  # the latter has head sizes of its own, among its fields
        settings["head_dim"] = head_dim
    config = AutoConfig.for_model(family, **settings)
    if unknown := [name for name in more if not hasattr(config, name) and name not in FAMILY_FIELDS.get(family, {})]:
        raise UserError(f"--fields: {family} has no {', '.join(unknown)}")
    config = AutoConfig.for_model(family, **settings | more)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    if family == "deepseek_v4":
        draw_experts(model)
        save_hub_checkpoint(model, output)
        model.generation_config.save_pretrained(output)
    else:
        model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"wrote {output}: {family}, {model.num_parameters() / 1e6:.2f}M parameters, {dtype}")


if __name__ == "__main__":
    run(make_tiny_checkpoint, __doc__)
