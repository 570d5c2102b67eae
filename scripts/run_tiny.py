"""A Qwen3 of a million parameters with random weights, on a CPU: all that the other scripts do, within two minutes."""

from launcher import Layout, Model, Recipe, main


def make(folder: str) -> list[str]:
    return ["-m", "miles.tools.make_tiny_checkpoint", "--num-layers", "2", "--output", folder]


RECIPE = Recipe(
    "A tiny model on a CPU",
    models=(Model("miles/tiny-qwen3", "0.5M", (Layout(("cpu",), max_tokens_per_gpu=1024),), make=make),),
    task="addition",
    flags={
        "device": "cpu",
        "num_rollout": 2,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "global_batch_size": 16,
        "save_interval": 1,
        "data_pad_size_multiplier": 1,
        "sglang_mem_fraction_static": None,
    },
)

if __name__ == "__main__":
    main(RECIPE)
