"""Every path is made absolute where it is read, and tried before anything starts."""

import os
from pathlib import Path

import pytest

from miles.config.paths import FunctionPath, PathText, absolute
from miles.config.resolve import ConfigError, resolve
from miles.config.run_config import RunConfig
from miles.config.section import base_type
from miles.config.validate import KINDS, tried_type

# Fields that hold texts and no paths. A new one is either named here or gets one of the types in miles/config/paths.py.
TEXTS = {
    *("rollout_external_engine_addrs", "sglang_router_ip", "session_server_ip", "opd_teacher_urls", "rm_url"),
    "generate_tool_call_parser",
    *("wandb_project", "wandb_group", "wandb_team", "wandb_host", "wandb_run_id", "wandb_key", "trackio_project"),
    *("mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_run_name", "mlflow_run_id"),
    *("input_key", "label_key", "metadata_key", "tool_key", "reward_key"),
    *("eval_input_key", "eval_label_key", "eval_tool_key", "eval_reward_key", "rollout_stop"),
    *("wandb_project", "wandb_group", "wandb_team", "wandb_host", "wandb_run_id", "wandb_key"),
    *("mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_run_name", "mlflow_run_id", "trackio_project"),
    # Dotted paths of functions that a rule of their own tries, and names and files in turn, of which the files are made
    # absolute.
    *("custom_loss_function_path", "custom_tis_function_path", "custom_rm_path", "eval_prompt_data"),
}
EXAMPLES = {"prompt_data": "a.jsonl@[:5]", "load_debug_rollout_data": "{rollout_id}.jsonl"}


def holds_text(annotation):
    kind = base_type(annotation)
    return kind in (str, list[str])


def test_no_path_is_forgotten():
    fields = RunConfig.model_fields
    assert {name for name, field in fields.items() if holds_text(field.annotation)} == TEXTS
    assert not KINDS.keys() & TEXTS
    dotted = {name for name, kind in KINDS.items() if kind is FunctionPath}
    assert dotted == {name for name in KINDS if name.endswith("_path") and name != "chat_template_path"}


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if issubclass(kind, PathText)])
def test_paths_are_absolute_and_filled_in(name, monkeypatch, folder):
    """In the configuration itself, so that every process on every machine reads the same."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/mnt/data")
    needed = {"hf_checkpoint": "m", "rollout_batch_size": 8}

    def value(text):
        found = getattr(RunConfig(**needed | {name: text}), name)
        return found[0] if isinstance(found, list) else found

    end = EXAMPLES.get(name, "x")
    for given, meant in (("", f"{folder}/"), ("~/", "/home/me/"), ("$DATA/", "/mnt/data/")):
        assert value(given + end) == meant + end and type(value(given + end)) is str
    for wrong, said in (("", "empty"), ("  ", "empty"), ("$NOWHERE/a", "NOWHERE is not set"), ("~nobody-x/a", "user")):
        with pytest.raises(ValueError, match=said):
            value(wrong)


def test_links_and_parents_are_left_as_they_are(folder):
    assert absolute("a/../b/") == f"{folder}/a/../b"


def test_files_of_evaluation_sets_are_absolute(folder):
    config = RunConfig(hf_checkpoint="m", rollout_batch_size=8, eval_prompt_data=["a", "a.jsonl", "b", "b.jsonl@[:3]"])
    assert config.eval_prompt_data == ["a", f"{folder}/a.jsonl", "b", f"{folder}/b.jsonl@[:3]"]


LOADED_TEACHER = {"use_opd": "", "opd_type": "megatron", "opd_teacher_load": "none"}
REFUSED = [
    ({"hf_checkpoint": "org/model"}, "--hf-checkpoint org/model is not a folder here; download the model first"),
    ({"hf_checkpoint": "empty"}, "--hf-checkpoint empty has no config.json that can be read"),
    ({"use_kl_loss": "", "ref_load": "old"}, "--ref-load old is not a folder here"),
    ({**LOADED_TEACHER}, "--opd-teacher-load none is not a folder here"),
    ({"load": "train.jsonl"}, "--load train.jsonl is not a folder"),
    ({"save": "train.jsonl/a"}, "--save train.jsonl/a: train.jsonl is not a folder"),
    ({"save_hf": "train.jsonl/{rollout_id}"}, "--save-hf train.jsonl/{rollout_id}: train.jsonl is not a folder"),
    ({"run_dir": "train.jsonl"}, "--run-dir train.jsonl: train.jsonl is not a folder"),
    ({"run_dir": "/proc/runs/a"}, "--run-dir /proc/runs/a: /proc can't be written to"),
    ({"save_debug_rollout_data": "/proc/{rollout_id}.jsonl"}, "/proc can't be written to"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refused(argv, folder, changes, message, monkeypatch):
    """Root may write anywhere: the system's answer to the question is taken over."""
    (folder / "empty").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode, ask=os.access: str(path) != "/proc" and ask(path, mode))
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert sum(message in problem for problem in caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize(
    "changes",
    [
        {"load": "new", "save": "new", "save_hf": "new/hf_{rollout_id}", "run_dir": "runs/a"},
        {"save_debug_rollout_data": "new/{rollout_id}/a.jsonl"},
        # Nobody looks for what only a trainer reads.
        {"debug_rollout_only": "", "load": "train.jsonl", "rollout_num_gpus": "2"},
    ],
)
def test_accepted(argv, folder, changes):
    resolve(argv(**changes))
    assert not (folder / "new").exists() and not (folder / "runs").exists()


def test_an_empty_path_is_refused_by_the_name_of_its_flag(argv):
    for flag in ("--run-dir", "--save"):
        with pytest.raises(ConfigError, match=f"{flag} is '': a path is needed, and it is empty"):
            resolve([*argv(), flag, ""])


def test_kinds_of_lists_and_of_what_may_be_missing():
    kinds = {name: tried_type(RunConfig.model_fields[name].annotation).__name__ for name in ("prompt_data", "save")}
    assert kinds == {"prompt_data": "PromptFile", "save": "OutputFolder"}
    assert Path(absolute(".")) == Path.cwd()
