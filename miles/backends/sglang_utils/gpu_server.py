"""`python -m miles.backends.sglang_utils.gpu_server ...`: `sglang.launch_server` without Megatron, its models cured.

SGLang imports Megatron where it is installed, only to read the ranks of a trainer in the same process. The import takes
seconds, and switches torch_memory_saver to the mode in which CUDA graphs can't be released.
"""

import runpy
import sys

# SGLang's schedulers are spawned processes, which import the main module again under the second name.
if __name__ in ("__main__", "__mp_main__"):
    assert "megatron" not in sys.modules, "Megatron is imported already"
    # Importing it raises ImportError, as if it were not installed.
    sys.modules["megatron"] = None  # type: ignore[assignment]

    from miles.backends.sglang_utils import deepseek_v4, float32_copies

    float32_copies.register()
    deepseek_v4.register()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
