"""What follows from what was given."""

import os
from datetime import datetime
from pathlib import Path

import pytest

from miles.config.derive import derive
from miles.config.offload import scratch_folder
from miles.config.resolve import resolve
from miles.config.run_config import RunConfig


def derived(**given):
    config = RunConfig(**({"hf_checkpoint": "/m", "rollout_batch_size": 8, "n_samples_per_prompt": 4} | given))
    return derive(dict(config), datetime(2026, 3, 4, 5, 6, 7))


ASKED = {
    "offload_train_target": "disk",
    "rematerialize_param_from_master_weight": True,
    "colocate_memory_peak_device": "gpu",
    "check_residency": True,
    "stream_optimizer_state_to_disk": True,
}
NOTHING_MOVES = {
    "offload_train": False,
    "offload_rollout": False,
    "offload_train_target": "cpu",
    "rematerialize_param_from_master_weight": False,
    "colocate_memory_peak_device": "cpu",
    "check_residency": False,
}
PPO = {"advantage_estimator": "ppo"}
STREAMS_NOT = {"stream_optimizer_state_to_disk": False, "offload_train_disk_dir": None}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"colocate": True}, {"offload_train": True, "offload_rollout": True, "rollout_num_gpus": 8}),
        ({"colocate": True, "offload_train": False}, {"offload_train": False, "offload_rollout": True}),
        ({"colocate": True, "actor_num_nodes": 2}, {"rollout_num_gpus": 16}),
        ({"offload": True, "rollout_num_gpus": 4}, {"offload_train": True, "offload_rollout": True}),
        ({"colocate": True, "offload": False}, {"offload_train": False, "offload_rollout": False}),
        ({"offload": False, "offload_train": True}, {"offload_train": True, "offload_rollout": False}),
        ({"offload": True, "offload_train": False}, {"offload_train": False, "offload_rollout": True}),
        ({"rollout_num_gpus": 4}, {"offload_train": False, "offload_rollout": False, "rollout_num_gpus": 4}),
        ({"loss_type": "sft_loss"}, {"rollout_num_gpus": 0, "offload_train": False}),
        ({"loss_type": "sft_loss", "colocate": True}, {"rollout_num_gpus": 0, "colocate": False}),
        ({"debug_train_only": True, "rollout_num_gpus": 4}, {"rollout_num_gpus": 0}),
        (
            {"debug_rollout_only": True, "colocate": True, "offload": True},
            {"rollout_num_gpus": 8, "colocate": False, "offload_train": False, "offload_rollout": False},
        ),
        (ASKED | {"debug_rollout_only": True}, NOTHING_MOVES | STREAMS_NOT),
        (ASKED | {"loss_type": "sft_loss"}, NOTHING_MOVES | {"stream_optimizer_state_to_disk": True}),
        ({"colocate": True} | ASKED, ASKED),
        ({"colocate": True}, {"offload_train_keep_host_buffers": True, "offload_train_disk_dir": None}),
        ({"colocate_memory_peak_device": "gpu"}, {"offload_train_keep_host_buffers": True}),
        (
            {"colocate_memory_peak_device": "gpu", "sglang": {"enable_weights_cpu_backup": True}},
            {"offload_train_keep_host_buffers": False},
        ),
        ({"sglang": {"enable_weights_cpu_backup": True}}, {"offload_train_keep_host_buffers": True}),
        ({"offload_train_keep_host_buffers": False}, {"offload_train_keep_host_buffers": False}),
        ({"colocate": True, "offload_train_target": "disk"}, {"offload_train_keep_host_buffers": None}),
        ({"device": "cuda"}, {"bf16": True, "bias_swiglu_fusion": True}),
        ({"device": "cpu"}, {"bf16": False, "bias_swiglu_fusion": False}),
        ({"device": "cpu", "bf16": True}, {"bf16": True}),
        ({}, {"global_batch_size": 32, "num_steps_per_rollout": 1}),
        ({"num_steps_per_rollout": 4}, {"global_batch_size": 8}),
        ({"global_batch_size": 16}, {"num_steps_per_rollout": 2}),
        ({"global_batch_size": 12}, {"num_steps_per_rollout": 3, "num_rollout": None}),
        ({"num_steps_per_rollout": 5}, {"global_batch_size": 7}),
        ({"num_rollout": 5, "global_batch_size": 12}, {"lr_decay_iters": 15}),
        (PPO | {"num_rollout": 5, "critic_lr_warmup_iters": 9}, {"lr_decay_iters": 10}),
        (PPO | {"num_rollout": 5, "num_critic_only_steps": 1}, {"lr_decay_iters": None}),
        (PPO | {"lr": 0.5, "load": "/a/", "save": "/b"},
         {"critic_lr": 0.5, "critic_load": "/a_critic", "critic_save": "/b_critic"}),
        (PPO | {"critic_lr": 0.1, "load": "/a", "critic_load": "/c", "save": "/b", "critic_save": "/d"},
         {"critic_lr": 0.1, "critic_load": "/c", "critic_save": "/d"}),
        (PPO, {"critic_load": None, "critic_save": None, "normalize_advantages": False}),
        ({"load": "/a"}, {"critic_lr": None, "critic_load": None}),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, {"normalize_advantages": True}),
        ({"advantage_estimator": "rloo"}, {"normalize_advantages": False}),
        ({"normalize_advantages": True}, {"normalize_advantages": True}),
        ({"advantage_estimator": "dr_grpo", "rollout_max_response_len": 9}, {"constant_loss_length": 9}),
        ({"advantage_estimator": "dr_grpo", "rollout_max_response_len": 9, "constant_loss_length": 5},
         {"constant_loss_length": 5}),
        ({"rollout_max_response_len": 9}, {"constant_loss_length": None}),
        ({"kl_coef": 0.1}, {"ref_load": "/m"}),
        ({"kl_coef": 0.1, "debug_rollout_only": True}, {"ref_load": None}),
        ({"num_rollout": 5, "num_steps_per_rollout": 4}, {"lr_decay_iters": 20}),
        ({"num_rollout": 5, "lr_warmup_iters": 9}, {"lr_decay_iters": 10}),
        ({"num_rollout": 5, "lr_warmup_iters": 5}, {"lr_decay_iters": 6}),
        ({"num_epoch": 5}, {"lr_decay_iters": None}),
        ({"eps_clip": 0.3}, {"eps_clip_high": 0.3}),
        ({"use_kl_loss": True}, {"ref_load": "/m"}),
        ({"use_kl_loss": True, "ref_load": "/r"}, {"ref_load": "/r"}),
        ({}, {"ref_load": None, "rollout_max_prompt_len": None}),
        ({"rollout_max_context_len": 100}, {"rollout_max_prompt_len": 99}),
        ({"rollout_temperature": 0.7, "rollout_top_p": 0.9, "rollout_top_k": 5, "rollout_max_response_len": 3},
         {"eval_temperature": 0.7, "eval_top_p": 0.9, "eval_top_k": 5, "eval_max_response_len": 3}),
        ({"rollout_max_response_len": 32768}, {"rollout_request_timeout": 1800 + 512 * 32768 / 2000}),
        ({"rollout_max_response_len": 4, "eval_max_response_len": 1000, "sglang_server_concurrency": 8},
         {"rollout_request_timeout": 1804.0}),
        ({"rollout_max_response_len": 32768, "rollout_request_timeout": 9.0}, {"rollout_request_timeout": 9.0}),
        ({"rollout_max_response_len": 10**6, "sglang_router_policy": "random"}, {"rollout_request_timeout": 14400.0}),
        ({"input_key": "q", "label_key": "a"}, {"eval_input_key": "q", "eval_label_key": "a"}),
        ({"eval_temperature": 0.0}, {"eval_temperature": 0.0}),
        ({"run_dir": "/here"}, {"run_dir": "/here"}),
    ],
)  # fmt: skip
def test_values(given, expected):
    values, reasons = derived(**given)
    assert {name: values[name] for name in expected} == expected
    unchanged = {"hf_checkpoint", "rollout_batch_size", "n_samples_per_prompt"}
    assert not unchanged & set(reasons)


@pytest.mark.parametrize("given", [{"offload_train_target": "disk"}, {"stream_optimizer_state_to_disk": True}])
def test_folder_on_disk(monkeypatch, tmp_path, given):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    values, reasons = derived(**given)
    assert values["offload_train_disk_dir"] == f"{tmp_path}/miles_train_offload_{os.getuid()}"
    assert reasons["offload_train_disk_dir"] == "$SCRATCH"
    assert derived(offload_train_disk_dir="/here", **given)[0]["offload_train_disk_dir"] == "/here"
    monkeypatch.setenv("SCRATCH", str(tmp_path / "missing"))
    assert derived(**given)[0]["offload_train_disk_dir"] is None


def test_runs_that_start_in_the_same_second_share_no_folder():
    first, second = (Path(derived()[0]["run_dir"]) for _ in range(2))
    assert first != second and first.parent == second.parent == Path("runs").absolute()
    assert first.name.startswith("2026-03-04_05-06-07_")


def test_scratch(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/nvme")
    assert scratch_folder() == Path("/nvme")
    for unset in (lambda: monkeypatch.setenv("SCRATCH", ""), lambda: monkeypatch.delenv("SCRATCH")):
        unset()
        assert scratch_folder() == Path("/scratch")


def test_reasons():
    _, reasons = derived(colocate=True, num_steps_per_rollout=4)
    assert reasons["rollout_num_gpus"] == "--colocate: the engines use the trainer's GPUs"
    assert reasons["offload_train"] == "--colocate"
    assert derived(colocate=True, offload=False)[1]["offload_train"] == "--no-offload"
    assert derived(offload=True)[1]["offload_rollout"] == "--offload"
    assert reasons["global_batch_size"] == "32 samples in 4 steps"
    assert "num_steps_per_rollout" not in reasons
    assert derived()[1]["num_steps_per_rollout"] == "--global-batch-size is a whole rollout"
    assert derived(global_batch_size=12)[1]["num_steps_per_rollout"] == "32 samples in steps of 12, the last of 8"
    reasons = derived(**PPO, use_kl_loss=True, load="a")[1]
    assert reasons["critic_lr"] == "--lr" and reasons["critic_load"] == "--load and _critic"
    assert reasons["ref_load"] == "--use-kl-loss: the reference is --hf-checkpoint"
    assert reasons["normalize_advantages"] == "--advantage-estimator ppo"
    reasons = derived(advantage_estimator="dr_grpo", kl_coef=0.1, rollout_max_response_len=9)[1]
    assert reasons["constant_loss_length"] == "--advantage-estimator dr_grpo: --rollout-max-response-len"
    assert reasons["ref_load"] == "--kl-coef 0.1: the reference is --hf-checkpoint"


def test_what_follows_from_an_unknown_value_is_unknown():
    known = dict(RunConfig(hf_checkpoint="m", rollout_batch_size=8))
    del known["rollout_batch_size"]
    values, _ = derive(known, datetime(2026, 1, 1))
    assert "global_batch_size" not in values and "lr_decay_iters" in values
    assert values["bf16"] is True


def test_layout(argv):
    config = resolve(argv(tensor_model_parallel_size="2", num_steps_per_rollout="4")).config
    assert (config.world_size, config.data_parallel_size, config.num_engines) == (4, 2, 4)
    assert (config.samples_per_rollout, config.steps_per_rollout) == (32, 4)
    assert config.needs_engines and config.needs_trainer
    sft = resolve(argv(loss_type="sft_loss", rm_type=None)).config
    assert not sft.needs_engines and sft.num_engines == 0
    rollout_only = resolve(argv("--debug-rollout-only")).config
    assert not rollout_only.needs_trainer and rollout_only.num_engines == 4
