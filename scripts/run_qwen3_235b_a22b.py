"""Qwen3 of 235 billion parameters, 22 billion of them active: 128 experts."""

from launcher import BLACKWELL, Layout, Model, Recipe, main

# 94 layers: three stages of 24 and one of 22.
SIZES = {"tp": 4, "pp": 4, "last_stage_layers": 22, "cp": 2}
LAYOUTS = (
    Layout(("H200", *BLACKWELL), nodes=8, ep=16, engine_gpus=8, max_tokens_per_gpu=8192, **SIZES),
    Layout(("H100",), nodes=16, ep=32, engine_gpus=8, engine_memory=0.85, max_tokens_per_gpu=8192, **SIZES),
    Layout(("GB300",), nodes=16, ep=16, engine_gpus=4, max_tokens_per_gpu=8192, **SIZES),
)

RECIPE = Recipe(
    "Qwen3 235B-A22B",
    models=(
        Model("Qwen/Qwen3-235B-A22B", "235B, 22B active", LAYOUTS),
        Model("Qwen/Qwen3-235B-A22B-Instruct-2507", "235B, 22B active", LAYOUTS),
    ),
    flags={"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
)

if __name__ == "__main__":
    main(RECIPE)
