"""Values that no field takes, and a machine without what is needed."""

from pathlib import Path

import pytest

from miles.config.resolve import ConfigError, resolve
from miles.residency.filesystem import filesystem_of


@pytest.mark.parametrize("content, problem", [("{", "is not valid JSON: Expecting"), ("[1]", "holds no JSON object")])
def test_config_json_must_hold_an_object(argv, folder, content, problem):
    (folder / "model" / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        resolve(argv())
    (only,) = caught.value.problems
    assert only.startswith(f"--hf-checkpoint model/config.json {problem}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_batch_size", "0"),
        ("rollout_batch_size", "1.5"),
        ("tensor_model_parallel_size", "0"),
        ("adam_beta1", "1"),
        ("adam_beta2", "-0.1"),
        ("adam_eps", "0"),
        ("lr", "nan"),
        ("lr", "-1"),
        ("eps_clip", "0"),
        ("eps_clip_c", "1"),
        ("clip_grad", "-1"),
        ("rollout_temperature", "-1"),
        ("rollout_top_p", "0"),
        ("max_reward_error_fraction", "1.1"),
        ("device", "gpu"),
        ("loss_type", "ppo"),
        ("rm_type", "bleu"),
        ("offload_train_target", "host"),
        ("offload_train_disk_chunk_mb", "0"),
        ("stream_optimizer_state_moment_dtype", "fp8"),
        ("colocate_memory_peak_device", "cuda"),
        ("train_memory_margin_bytes", "-1"),
    ],
)
def test_ranges(argv, name, value):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**{name: value}))
    (problem,) = caught.value.problems
    assert problem.startswith(f"--{name.replace('_', '-')} is '{value}': input should be ")


def test_no_scratch(argv, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/nowhere")
    with pytest.raises(ConfigError) as caught:
        resolve(argv("--stream-optimizer-state-to-disk"))
    (problem,) = caught.value.problems
    assert problem.startswith("--offload-train-disk-dir is not given") and "/nowhere is no folder here" in problem


def test_the_system_lists_its_mounts():
    assert filesystem_of(Path("/proc/self")) == "proc"


def test_levels_have_names(argv):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(offload_rollout_level="weights"))
    (problem,) = caught.value.problems
    assert problem == "--offload-rollout-level[0] is 'weights': input should be 'kv_cache' or 'weight'"
