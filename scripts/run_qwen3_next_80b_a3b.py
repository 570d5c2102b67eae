"""Qwen3-Next of 80 billion parameters, 3 billion of them active: gated delta nets and 512 experts."""

from launcher import BLACKWELL, Layout, Model, Recipe, main

LAYOUTS = (
    Layout(("H200", *BLACKWELL), nodes=4, tp=2, pp=4, cp=2, ep=8, engine_gpus=8, max_tokens_per_gpu=8192),
    Layout(("GB300",), nodes=4, tp=2, pp=2, cp=2, ep=8, engine_gpus=4, max_tokens_per_gpu=8192),
)

RECIPE = Recipe(
    "Qwen3-Next 80B-A3B",
    models=(
        Model("Qwen/Qwen3-Next-80B-A3B-Instruct", "80B, 3B active", LAYOUTS),
        Model("Qwen/Qwen3-Next-80B-A3B-Thinking", "80B, 3B active", LAYOUTS),
    ),
    flags={"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
)

if __name__ == "__main__":
    main(RECIPE)
