"""Every flag does something: its field is read outside of the configuration."""

import ast
from pathlib import Path

from miles.config import RunConfig

ROOT = Path(__file__).parents[3]

# Read while the configuration is made, and only there: each shapes the fields and layout properties that others read.
SHAPES_OTHERS = {
    "advantage_estimator": "read as estimator",
    "offload": "expands to offload_train and offload_rollout",
    "actor_num_nodes": "read as world_size",
    "num_gpus_per_node": "bounds the sizes that must fit on a node",
    "num_steps_per_rollout": "sets global_batch_size",
    "use_dynamic_batch_size": "decides whether max_tokens_per_gpu is given",
    "max_tokens_per_gpu": "read as max_tokens_per_micro_batch",
    "dump_details": "sets save_debug_rollout_data",
    "debug_train_only": "read as needs_engines",
    "wandb_key": "is only warned of: the key comes from the environment",
    "debug_rollout_only": "read as needs_trainer",
}


def attributes_read(file, bases):
    """Names read as `base.name` or `something.base.name` in a file."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if ast.unparse(node.value).split(".")[-1] in bases}


def test_every_field_is_read():
    outside = [ROOT / "train.py", *(f for f in (ROOT / "miles").rglob("*.py") if f.parent.name != "config")]
    outside.append(ROOT / "miles" / "config" / "residency.py")  # what the driver and the ranks move
    inside = (ROOT / "miles" / "config").glob("*.py")
    read = set().union(*(attributes_read(file, {"config", "_config"}) for file in outside))
    read_by_checks = set().union(*(attributes_read(file, {"v", "self"}) for file in inside))
    unread = [name for name in RunConfig.model_fields if name not in read and name not in SHAPES_OTHERS]
    assert not unread, f"no module reads {', '.join(unread)}"
    assert set(SHAPES_OTHERS) <= set(RunConfig.model_fields)
    unshaped = set(SHAPES_OTHERS) - read_by_checks
    assert not unshaped, f"no check or derivation reads {', '.join(unshaped)}"
