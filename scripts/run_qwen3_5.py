"""Qwen3.5, the language model: gated delta nets; the largest one here has 256 experts."""

from launcher import BLACKWELL, GRACE, HOPPER, Layout, Model, Recipe, main

SMALL = (Layout(HOPPER + BLACKWELL + GRACE, tp=2),)

RECIPE = Recipe(
    "Qwen3.5",
    models=(
        Model(
            "Qwen/Qwen3.5-35B-A3B",
            "35B, 3B active",
            (
                Layout(("H200", *BLACKWELL), tp=2, cp=2, ep=8, engine_gpus=8, max_tokens_per_gpu=8192),
                Layout(("H100",), nodes=2, tp=2, cp=2, ep=8, engine_gpus=8, max_tokens_per_gpu=8192),
                Layout(("GB300",), nodes=2, tp=2, cp=2, ep=8, engine_gpus=4, max_tokens_per_gpu=8192),
            ),
        ),
        Model(
            "Qwen/Qwen3.5-27B",
            "27B",
            (
                Layout(("H200", *BLACKWELL), tp=4, engine_gpus=2, max_tokens_per_gpu=8192),
                Layout(("H100",), nodes=2, tp=4, engine_gpus=2, max_tokens_per_gpu=8192),
                Layout(("GB300",), nodes=2, tp=4, engine_gpus=2, max_tokens_per_gpu=8192),
            ),
        ),
        Model("Qwen/Qwen3.5-9B", "9B", SMALL, flags={"sglang_mem_fraction_static": 0.6}),
        Model("Qwen/Qwen3.5-4B", "4B", SMALL),
    ),
)

if __name__ == "__main__":
    main(RECIPE)
