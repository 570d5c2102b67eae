"""The command line that scripts/run_*.py share, without Ray: options, plans, steps, what is printed."""

import json
import shlex
import socket
import sys

import pytest
import torch
from safetensors.torch import save_file

from miles.config.resolve import resolve
from miles.utils.errors import UserError
from miles.utils.network import free_ports
from tests.fast.scripts.launching import ROOT, SCRIPTS, make_folders, module_of, plan_of, recipe_of

from launcher import app, cluster, job  # isort: skip
from launcher.options import Options  # isort: skip
from launcher.plan import environment_of  # isort: skip
from launcher.prepare import Step, copy_steps, missing_of_checkpoint, run_steps, steps  # isort: skip
from launcher.recipe import Layout, Model, Recipe, words  # isort: skip

QWEN = recipe_of(ROOT / "scripts/run_qwen3_4b.py")


@pytest.fixture
def folder(tmp_path):
    make_folders(tmp_path, [QWEN.models[0]])
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Run a script's command line in folders of its own, and return what it printed."""
    for name in ("model", "data", "output"):
        monkeypatch.setenv(f"MILES_SCRIPT_{name.upper()}_DIR", str(folder / f"{name}s"))

    def call(*arguments, recipe=QWEN, actions=()):
        monkeypatch.setattr(sys, "argv", ["run_it.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main(recipe, dict(actions))
        printed = capsys.readouterr()
        return ended.value.code, printed.out + printed.err

    return call


def test_a_flag_wins_over_the_variable_and_the_variable_over_the_default(run, monkeypatch):
    monkeypatch.setenv("MILES_SCRIPT_NUM_NODES", "2")
    monkeypatch.setenv("MILES_SCRIPT_HARDWARE", "H200")
    assert "--actor-num-nodes 2 " in run("train", "--dry-run")[1]
    assert "--actor-num-nodes 4 " in run("train", "--dry-run", "--num-nodes", "4")[1]
    assert "--actor-num-gpus-per-node 8 " in run("train", "--dry-run")[1]


def test_the_nodes_are_those_of_the_slurm_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "16")
    assert Options().num_nodes == 16
    assert Options(num_nodes=2).num_nodes == 2


def test_without_a_subcommand_all_is_done_and_nothing_with_dry_run(run, folder):
    code, text = run("--dry-run", "--run-id", "it", "--hardware", "H100")
    lines = text.splitlines()
    assert code == 0
    assert lines[0] == f"hf download Qwen/Qwen3-4B --local-dir {folder}/models/Qwen3-4B"
    assert lines[1].startswith("hf download zhuzilin/dapo-math-17k --repo-type dataset --local-dir ")
    assert lines[3] == "ray start --head --disable-usage-stats --port 6379 --dashboard-port 8265 --num-gpus=8"
    submitted = shlex.split(lines[4])
    assert submitted[:5] == ["ray", "job", "submit", "--address", "http://127.0.0.1:8265"]
    assert submitted[-3:-1] == ["bash", "-c"] and "train.py --num-rollout 3000" in submitted[-1]
    assert not (folder / "outputs").exists()


def test_what_is_there_is_not_made_again(run, folder):
    (folder / "datas").symlink_to(folder / "data")
    lines = run("prepare", "--dry-run")[1].splitlines()
    assert lines[1] == f"# prompts {folder}/datas/dapo-math-17k/dapo-math-17k.jsonl: there"


def test_a_step_runs_only_where_its_result_is_missing_and_must_leave_it(tmp_path, capfd):
    path = tmp_path / "made"
    command = [sys.executable, "-c", f"open({str(path)!r}, 'a').write('once')"]
    step = Step("it", command, lambda: None if path.exists() else "it is not there")
    run_steps([step], dry_run=True)
    assert not path.exists()
    run_steps([step], dry_run=False)
    run_steps([step], dry_run=False)
    assert path.read_text() == "once"
    assert capfd.readouterr().out.splitlines() == [shlex.join(command), shlex.join(command), "# it: there"]

    with pytest.raises(UserError, match="exit code 3 of: "):
        run_steps([Step("it", [sys.executable, "-c", "exit(3)"], lambda: "missing")], dry_run=False)
    with pytest.raises(UserError, match="ended well, and yet it is not there"):
        run_steps([Step("it", [sys.executable, "-c", ""], lambda: "it is not there")], dry_run=False)


def make_whole(folder):
    """A checkpoint as small as can be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    save_file({"a": torch.zeros(3)}, folder / "model.safetensors")


def test_a_checkpoint_is_whole_with_its_tokenizer_and_all_bytes(tmp_path):
    assert missing_of_checkpoint(tmp_path) == f"{tmp_path}/config.json is not there"
    make_whole(tmp_path)
    assert missing_of_checkpoint(tmp_path) is None
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "cut off" in missing_of_checkpoint(tmp_path)
    weights.unlink()
    assert "neither model.safetensors.index.json nor model.safetensors" in missing_of_checkpoint(tmp_path)


def test_a_node_has_its_own_copy_of_the_checkpoint(tmp_path):
    make_whole(tmp_path / "models/Qwen3-4B")
    plan = plan_of(QWEN, tmp_path, hardware="H200", model_local_dir=tmp_path / "local disk")
    assert plan.flags()["hf_checkpoint"] == f"{tmp_path}/local disk/Qwen3-4B"
    (step,) = copy_steps(plan)
    assert step.missing() == f"{tmp_path}/local disk/Qwen3-4B/config.json is not there"
    run_steps([step], dry_run=False)
    assert step.missing() is None
    assert copy_steps(plan_of(QWEN, tmp_path, hardware="H200")) == []


def test_a_checkpoint_of_ones_own_is_not_downloaded(folder):
    step = steps(plan_of(QWEN, folder, hardware="H200", hf_checkpoint=folder / "mine"))[0]
    with pytest.raises(UserError, match="--hf-checkpoint: .*mine/config.json is not there"):
        run_steps([step], dry_run=False)


def test_unknown_choices_are_told_with_those_there_are(folder):
    with pytest.raises(UserError, match="--model-name Qwen3-5B: this script trains Qwen3-4B, Qwen3-4B-Base"):
        plan_of(QWEN, folder, model_name="Qwen3-5B")
    large = recipe_of(ROOT / "scripts/run_qwen3_235b_a22b.py")
    with pytest.raises(UserError, match="no layout for 3 x 8 H200; there are 8 x 8 H200, 8 x 8 B200, .*16 x 4 GB300"):
        plan_of(large, folder, hardware="H200", num_nodes=3)
    with pytest.raises(UserError, match="--rollout-num-nodes 2 of --num-nodes 2: the trainer needs one"):
        plan_of(QWEN, folder, num_nodes=2, rollout_num_nodes=2)


def test_of_several_layouts_the_largest_that_fits_is_taken():
    layouts = (Layout(("H200",), nodes=1), Layout(("H200",), nodes=4, tp=2), Layout(("H100",), nodes=8, tp=4))
    model = Model("a/b", "1B", layouts)
    assert [model.layout("H200", nodes, 8).nodes for nodes in (1, 2, 4, 6, 8)] == [1, 1, 4, 1, 4]


def test_later_flags_win_and_none_takes_one_out(folder):
    tuned = Recipe("it", (QWEN.models[0],), flags={"lr": 3e-6, "weight_decay": None, "rollout_stop": ("a b", "c")})
    command = plan_of(tuned, folder, hardware="H200", extra_args="--num-rollout 7 --rollout-top-p 0.9").train_command()
    config = resolve(command[2:]).config
    assert (config.lr, config.weight_decay, config.rollout_stop) == (3e-6, 0.01, ["a b", "c"])
    assert (config.num_rollout, config.rollout_top_p) == (7, 0.9)
    assert words({"colocate": False, "lr": None}) == ["--no-colocate"]


def test_debug_minimal_and_no_eval(folder):
    small = resolve(plan_of(QWEN, folder, hardware="H200", mode="debug_minimal").train_command()[2:]).config
    assert (small.num_rollout, small.rollout_max_response_len, small.eval_interval) == (3, 256, None)
    full = resolve(plan_of(QWEN, folder, hardware="H200").train_command()[2:]).config
    assert (full.num_rollout, full.rollout_max_response_len, full.eval_interval) == (3000, 8192, 20)


@pytest.mark.parametrize("text", ["A=1 B='x y'", '{"A": 1, "B": "x y"}'])
def test_environment_variables_in_two_forms(text):
    assert environment_of(text) == {"A": "1", "B": "x y"}


def test_environment_variables_that_cannot_be_read_or_are_secret():
    with pytest.raises(UserError, match="--extra-env-vars A: write NAME=VALUE"):
        environment_of("A")
    with pytest.raises(UserError, match="names HF_TOKEN, which would stand in lists"):
        environment_of("HF_TOKEN=hf_abc")


def test_secrets_of_the_environment_are_not_printed(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("WANDB_API_KEY", "ghijkl")
    text = run("--dry-run")[1]
    assert "abcdef" not in text and "ghijkl" not in text and "--use-wandb" in text


def test_relative_paths_mean_what_they_mean_here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    plan = plan_of(QWEN, folder, hardware="H200", extra_env_vars="A=1")
    assert job.entrypoint(plan).startswith(f"cd {folder} && exec {sys.executable} {ROOT}/train.py ")
    assert " && RAY_ADDRESS=10.0.0.1:6379 exec " in job.entrypoint(plan, "10.0.0.1:6379")
    submitted = shlex.split(job.submit_command(plan, "auto"))
    assert json.loads(submitted[6]) == {"env_vars": {"PYTHONUNBUFFERED": "1", "A": "1"}}
    assert submitted[-1] == job.entrypoint(plan)


def test_a_cluster_that_runs_is_joined(run, monkeypatch, folder):
    plan = plan_of(QWEN, folder, hardware="H200")
    assert cluster.address_to_join(plan) is None
    monkeypatch.setenv("MILES_SCRIPT_EXTERNAL_RAY", "1")
    assert "ray start" not in run("train", "--dry-run")[1]
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    assert cluster.address_to_join(plan) == "http://head:8265"


def test_the_nodes_of_a_slurm_job_join_the_first(folder, monkeypatch, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[3-4]")
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert (cluster.slurm_rank(), cluster.slurm_head()) == (1, "node3")
    plan = plan_of(QWEN, folder, hardware="GB300", num_nodes=2)
    assert cluster.worker_command(plan, "node3")[1:] == "start --address node3:6379 --block --num-gpus=4".split()


def test_a_port_that_is_taken_is_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        plan = plan_of(QWEN, folder, hardware="H200", ray_port=free_ports(1)[0], dashboard_port=port)
        with pytest.raises(UserError, match=f"port {port} is taken: .*--external-ray"):
            with cluster.started(plan):
                pass


def test_check_looks_at_the_hardware_without_a_gpu(run, folder):
    assert "--check --check-hardware GB300" in run("check", "--dry-run", "--hardware", "GB300")[1]


def test_deepseek_v4_has_the_subcommands_of_miles_own_script(run):
    module = module_of(ROOT / "scripts/run_deepseek_v4.py")
    choice = ("--hardware", "H200", "--num-nodes", "8")
    call = {"recipe": module.RECIPE, "actions": module.ACTIONS}
    assert "hf download deepseek-ai/DeepSeek-V4-Flash" in run("prepare-download", "--dry-run", *choice, **call)[1]
    for name in ("prepare-single", "prepare-spmd"):
        assert "nothing to convert" in run(name, *choice, **call)[1]
    assert "prepare-cp copies the checkpoint to --model-local-dir" in run("prepare-cp", *choice, **call)[0]
    copied = run("prepare-cp", "--dry-run", "--model-local-dir", "/local", *choice, **call)[1]
    assert "cp -rT" in copied and "/local/DeepSeek-V4-Flash" in copied
    assert "engines hold bf16 weights here" in run("prepare-mxfp8", *choice, **call)[0]
    pro = ("--model-name", "DeepSeek-V4-Pro", "--hardware", "H200", "--num-nodes", "32")
    assert "DeepSeek-V4-Pro cannot be trained yet: its bf16 weights take" in run("train", *pro, **call)[0]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_short(path):
    assert len(path.read_text().splitlines()) <= 80
