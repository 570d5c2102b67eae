"""Every rule, broken once."""

from pathlib import Path

import pytest

from miles.config.resolve import ConfigError, resolve
from miles.residency.filesystem import filesystem_of

OFFLOADS = {"no_offload_train": None, "no_offload_rollout": None, "offload": ""}
DISTIL = {"use_opd": "", "opd_type": "megatron", "opd_teacher_load": "model"}
REBUILDS = {"rematerialize_param_from_master_weight": ""}
CASES = {
    "_planned_moves": [
        ({"colocate_memory_peak_device": "gpu"}, "it needs --offload-train and --offload-rollout"),
        ({**OFFLOADS, "colocate_memory_peak_device": "gpu", "advantage_estimator": "ppo"}, "does not work with a crit"),
        ({"offload_train_target": "disk"}, "disk says where the sleeping trainer goes: it needs"),
        ({**REBUILDS, "bf16": ""}, "saves bytes when the trainer sleeps: it needs --offload-train"),
        ({**OFFLOADS, **REBUILDS, "offload_train_target": "disk"}, "does not work with --offload-train-target disk"),
        ({**OFFLOADS, **REBUILDS, "stream_optimizer_state_to_disk": ""}, "with --stream-optimizer-state-to-disk"),
    ],
    "_moving_for_nobody": [
        ({"colocate": None, "rollout_num_gpus": "4", "no_offload_rollout": None, "offload": ""},
         "--offload-rollout without --colocate: memory moves between trainer and engines on the same GPUs, and here "
         "each side has its own; add --colocate, or drop the offload"),
        ({"colocate": None, "rollout_num_gpus": "4", **OFFLOADS}, "--offload-train and --offload-rollout without --co"),
    ],
    "_levels": [
        ({"offload_rollout_level": "weight kv_cache weight"}, "--offload-rollout-level names weight more than once"),
    ],
    "_master_weights": [
        ({**OFFLOADS, **REBUILDS}, "--rematerialize-param-from-master-weight needs --bf16: in fp32 the weights"),
        ({**OFFLOADS, **REBUILDS, "bf16": "", "no_use_distributed_optimizer": ""},
         "--rematerialize-param-from-master-weight needs --use-distributed-optimizer, whose masters"),
    ],
    "_streaming": [
        ({"stream_optimizer_state_to_disk": "", "no_use_distributed_optimizer": ""},
         "--stream-optimizer-state-to-disk needs --use-distributed-optimizer, whose buckets it streams"),
        ({"stream_optimizer_state_moment_dtype": "bf16"},
         "--stream-optimizer-state-moment-dtype bf16 has no effect without --stream-optimizer-state-to-disk; add that"),
    ],
    "_disk": [
        ({**OFFLOADS, "offload_train_disk_dir": "away"},
         "--offload-train-disk-dir away has no effect without --offload-train-target disk or --stream-optimizer-state"),
        ({**OFFLOADS, "offload_train_target": "disk", "offload_train_disk_dir": "/dev/shm/away/run"},
         "--offload-train-disk-dir /dev/shm/away/run is in memory (tmpfs), so that what goes there stays on the host"),
        ({"stream_optimizer_state_to_disk": "", "offload_train_disk_dir": "/dev/shm"},
         "is in memory (tmpfs), so that what goes there stays on the host; choose a folder on a disk, or "
         "--offload-train-target cpu without --stream-optimizer-state-to-disk"),
    ],
    "_checks": [({"check_residency": ""}, "--check-residency has no effect without --offload-train")],
    "_lengths": [
        ({"rollout_max_response_len": None}, "--rollout-max-response-len is required"),
        ({"rollout_max_prompt_len": "9", "rollout_max_context_len": "9"},
         "--rollout-max-prompt-len 9 leaves no room for a response within --rollout-max-context-len 9; at most 8"),
    ],
    "_sampling": [
        ({"rollout_temperature": "0"}, "--rollout-temperature 0 cannot be trained on"),
        ({"eval_top_k": "0"}, "at least 1, or -1 for all tokens; 0 was given"),
    ],
    "_labels": [
        ({"label_key": None, "loss_type": "sft_loss"}, "--loss-type sft_loss needs --label-key"),
    ],
    "_checkpoints": [
        ({"save_interval": "2"}, "--save-interval 2 needs --save"),
        ({"ckpt_step": "2"}, "--ckpt-step 2 needs --load"),
        ({"no_load_optim": ""}, "--no-load-optim has no effect without --load"),
        ({"save_hf": "out/{step}"}, "--save-hf out/{step}: the only thing in braces may be {rollout_id}"),
        ({"save_hf": "model"}, "--save-hf model exists and was not written by this program: name another folder"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), [case for cases in CASES.values() for case in cases])
def test_refused(argv, changes, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert sum(expected in problem for problem in caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize("content, problem", [("{", "is not valid JSON: Expecting"), ("[1]", "holds no JSON object")])
def test_config_json_must_hold_an_object(argv, folder, content, problem):
    (folder / "model" / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        resolve(argv())
    (only,) = caught.value.problems
    assert only.startswith(f"--hf-checkpoint model/config.json {problem}")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device": "cuda"},
        {"tensor_model_parallel_size": "2"},
        {"tensor_model_parallel_size": "2", "sequence_parallel": ""},
        {"pipeline_model_parallel_size": "4"},
        {"colocate": None, "rollout_num_gpus": "2"},
        {"loss_type": "sft_loss", "n_samples_per_prompt": "1", "rm_type": None, "rollout_max_response_len": None},
        {"n_samples_per_prompt": "1", "disable_rewards_normalization": ""},
        {"debug_rollout_only": "", "rollout_temperature": "0", "no_offload_train": None},
        {"use_dynamic_batch_size": "", "max_tokens_per_gpu": "100", "balance_by_flops": "", "balance_data": ""},
        {"global_batch_size": "4", "micro_batch_size": "3"},
        {"num_steps_per_rollout": "8", "global_batch_size": "4"},
        {"pipeline_model_parallel_size": "2", "num_layers_per_virtual_pipeline_stage": "1", "global_batch_size": "2"},
        {"eval_interval": "2", "eval_prompt_data": "a held_out.jsonl b train.jsonl", "eval_temperature": "0"},
        {"save": "out", "save_interval": "1", "save_hf": "out/hf_{rollout_id}", "load": "out"},
        {"rm_type": None, "custom_rm_path": "my_package.my_module.reward", "label_key": None},
        {"use_kl_loss": "", "kl_loss_coef": "0"},
        {"bf16": ""},
        {"no_offload_train": None, "no_offload_rollout": None},
        {"no_offload_train": None},
        {"no_offload_rollout": None, "offload_rollout_level": "weight"},
        {"no_offload_rollout": None, "offload_rollout_level": ""},
        {**OFFLOADS, "colocate_memory_peak_device": "gpu"},
        {**OFFLOADS, "offload_train_target": "disk", "offload_train_disk_dir": "away", "check_residency": ""},
        {**OFFLOADS, **REBUILDS, "bf16": ""},
        {"stream_optimizer_state_to_disk": "", "stream_optimizer_state_moment_dtype": "bf16"},
        {**OFFLOADS, "offload_train_target": "disk", "offload_train_disk_dir": "/dev/shm", "actor_num_nodes": "2"},
        {**OFFLOADS, "offload_train_disk_dir": "/dev/shm", "offload_train_target": "disk", "debug_rollout_only": ""},
        {"stream_optimizer_state_moment_dtype": "bf16", "debug_rollout_only": ""},
    ],
)
def test_accepted(argv, changes):
    assert resolve(argv(**changes)).warnings == []


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
