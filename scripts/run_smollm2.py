"""SmolLM2: three small dense models, each on one GPU or more."""

from launcher import BLACKWELL, GRACE, HOPPER, Layout, Model, Recipe, main

ANY = HOPPER + BLACKWELL + GRACE
LAYOUTS = (Layout(ANY, max_tokens_per_gpu=16384), Layout(ANY, gpus_per_node=1, max_tokens_per_gpu=16384))

RECIPE = Recipe(
    "SmolLM2",
    models=tuple(Model(f"HuggingFaceTB/SmolLM2-{size}-Instruct", size, LAYOUTS) for size in ("135M", "360M", "1.7B")),
    task="gsm8k",
)

if __name__ == "__main__":
    main(RECIPE)
