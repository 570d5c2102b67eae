"""`python deepseek_v4_layers.py FOLDER RESULT`: angles of SGLang's own DeepSeek-V4, as it comes and as Miles has it.

RESULT becomes a file of torch: {"SGLang" or "Miles": [of each layer e^(i angle), [positions, pairs]]}.
"""

import sys
from pathlib import Path

import torch

from miles.backends.sglang_utils.deepseek_v4 import plain_ropes
from tests.fast.backends.megatron_utils.families import sglang_loaders


def angles(folder: Path) -> list[torch.Tensor]:
    return [layer.self_attn.freqs_cis.clone() for layer in sglang_loaders.built(folder).model.layers]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sglang_loaders.start(folder)
    stock = angles(folder)
    with plain_ropes():
        torch.save({"SGLang": stock, "Miles": angles(folder)}, sys.argv[2])
