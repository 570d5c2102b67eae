"""DeepSeek-R1 and V3 of 671 billion parameters, 37 billion of them active; their FP8 weights are read as they are.

An engine holds the weights in bf16, 1342 GB, and lives on one node: of those here only B300's have room for it.
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
        cp=2,
        ep=16,
        engine_gpus=8,
        engine_memory=0.8,
        max_tokens_per_gpu=8192,
    ),
)

RECIPE = Recipe(
    "DeepSeek-R1 and V3",
    models=tuple(
        Model(f"deepseek-ai/{name}", "671B, 37B active", LAYOUTS)
        for name in ("DeepSeek-R1", "DeepSeek-R1-0528", "DeepSeek-V3", "DeepSeek-V3-0324", "DeepSeek-V3.1")
    ),
)

if __name__ == "__main__":
    main(RECIPE)
