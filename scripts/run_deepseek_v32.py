"""DeepSeek-V3.2: V3 with sparse attention; the indexer stays as it is. The FP8 weights are read as they are.

An engine holds the weights in bf16, 1344 GB, and lives on one node: of those here only B300's have room for it.
"""

from launcher import Layout, Model, Recipe, main

# 61 layers: three stages of 16 and one of 13.
LAYOUTS = (
    Layout(
        ("B300",),
        nodes=8,
        tp=8,
        pp=4,
        last_stage_layers=13,
        ep=16,
        engine_gpus=8,
        engine_memory=0.8,
        max_tokens_per_gpu=8192,
    ),
)

RECIPE = Recipe(
    "DeepSeek-V3.2",
    models=(Model("deepseek-ai/DeepSeek-V3.2", "672B, 37B active", LAYOUTS),),
)

if __name__ == "__main__":
    main(RECIPE)
