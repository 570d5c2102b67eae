import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.tools.make_tiny_checkpoint import byte_tokenizer, make_tiny_checkpoint

SIZES = dict(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_transformers_loads_what_was_written(tmp_path, family, tie):
    make_tiny_checkpoint(tmp_path, family=family, tie=tie, seed=3, **SIZES)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == family and model.config.vocab_size == 264
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "é"}], add_generation_prompt=True)["input_ids"]
    out = model.generate(torch.tensor([ids]), max_new_tokens=4)
    assert len(ids) < out.shape[1] <= len(ids) + 4
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == 259
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_more_fields_of_config_json(tmp_path):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    make_tiny_checkpoint(tmp_path, family="qwen3_moe", fields=json.dumps(fields), **SIZES)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert {name: getattr(config, name) for name in fields} == fields
    with pytest.raises(ValueError, match="qwen3_moe has no num_expert$"):
        make_tiny_checkpoint(tmp_path, family="qwen3_moe", fields='{"num_expert": 4}', **SIZES)
    with pytest.raises(ValueError, match="JSON object"):
        make_tiny_checkpoint(tmp_path, fields="[]", **SIZES)


@pytest.mark.parametrize(
    "text", ["rev 52831", "é 漢字 😀\u200d\U0001f468", " a  b , c .\n\t\r\n", "\x00\x7f'll don't", ""]
)
def test_any_text_comes_back(tiny_checkpoint, text):
    for tokenizer in (byte_tokenizer(), AutoTokenizer.from_pretrained(tiny_checkpoint)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_special_tokens_and_padding_rows():
    tokenizer = byte_tokenizer()
    names = ["<|pad|>", "<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>"]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(256, 261))
    assert tokenizer.encode("a<|end|>b") == [97, 259, 98]
    assert tokenizer.decode([97, 259], skip_special_tokens=True) == "a"
    assert tokenizer.decode([97, 261, 263, 98]) == "ab"


def test_a_turn_reads_as_documented():
    messages = [{"role": "user", "content": "rev 1"}, {"role": "assistant", "content": "1"}]
    assert byte_tokenizer().apply_chat_template(messages, tokenize=False) == "<|user|>rev 1<|assistant|>1<|end|>"


def test_a_seed_gives_the_same_weights(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_checkpoint(tmp_path / name, seed=seed, dtype="bfloat16", init_std=0.5, **SIZES)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    weight = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto").model.embed_tokens.weight
    assert weight.dtype == torch.bfloat16 and 0.4 < weight.float().std() < 0.6


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 260}, "--vocab-size 260: the tokenizer needs at least 261"),
        ({"num_kv_heads": 3}, "does not divide"),
        ({"family": "qwen2", "head_dim": 32}, "qwen2 allows only"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, sizes, message):
    with pytest.raises(ValueError, match=message):
        make_tiny_checkpoint(tmp_path, **(SIZES | sizes))


def test_fields_that_published_checkpoints_have_and_transformers_ignores(tmp_path):
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    experts |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1}
    make_tiny_checkpoint(tmp_path, family="deepseek_v3", fields=json.dumps(experts), **SIZES)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["moe_layer_freq"], written["topk_method"], written["scoring_func"]) == (1, "noaux_tc", "sigmoid")


def test_a_deepseek_v4_has_the_names_and_fields_of_the_hub(tmp_path):
    sizes = SIZES | {"num_layers": 4, "num_kv_heads": 1, "num_heads": 8}
    fields = json.dumps({"n_routed_experts": 4, "num_hash_layers": 1})
    make_tiny_checkpoint(tmp_path, family="deepseek_v4", tie=False, fields=fields, dtype="bfloat16", **sizes)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["compress_ratios"], written["num_hash_layers"], written["n_routed_experts"]) == (
        [0, 0, 4, 128],
        1,
        4,
    )
    weights = load_file(tmp_path / "model.safetensors")
    assert {"embed.weight", "layers.2.attn.indexer.compressor.ape", "layers.3.ffn.experts.3.w2.weight"} < weights.keys()
    table = weights["layers.0.ffn.gate.tid2eid"]
    assert table.dtype == torch.int64 and (table[:, 0] != table[:, 1]).all()
    assert weights["embed.weight"].dtype == torch.bfloat16
    assert weights["layers.0.hc_attn_fn"].dtype == weights["layers.0.attn.attn_sink"].dtype == torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(loaded.model.layers[0].mlp.gate.tid2eid, table)
    assert torch.equal(loaded.lm_head.weight, weights["head.weight"])
    with pytest.raises(ValueError, match="give --num-kv-heads 1 --no-tie"):
        make_tiny_checkpoint(tmp_path, family="deepseek_v4")
