"""examples/cluster: the SLURM script and the RayJob of Kubernetes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.fast.scripts.launching import ROOT, recipe_of

from launcher import app  # isort: skip

SLURM = ROOT / "examples/cluster/slurm.sh"
RAYJOB = ROOT / "examples/cluster/kuberay.yaml"


@pytest.fixture
def job():
    return yaml.safe_load(RAYJOB.read_text())


def schema_problems(job: dict) -> list[str]:
    schema = json.loads(Path(__file__).with_name("rayjob.schema.json").read_text())
    return [error.json_path for error in jsonschema.Draft202012Validator(schema).iter_errors(job)]


def test_the_rayjob_has_kuberays_fields(job):
    assert schema_problems(job) == []
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["container"] = []
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] = 0
    wrong = schema_problems(job)
    assert len(wrong) == 2 and "num-gpus" in wrong[0] and wrong[1].endswith("workerGroupSpecs[0].template.spec")


def test_the_rayjob_is_for_the_ray_that_is_installed(job):
    pinned = re.search(r"^ray\[default\]==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert pinned and job["spec"]["rayClusterSpec"]["rayVersion"] == pinned[1]


def planned(command: str, monkeypatch, capsys) -> str:
    """What a script that stands in an example would do: the words behind `python` and its path."""
    script, *words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [script, *words, "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        app.main(recipe_of(ROOT / "scripts" / Path(script).name))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_rayjob_runs_its_script_on_the_gpus_of_its_pods(job, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # as Ray sets it for a job
    python, _, command = job["spec"]["entrypoint"].partition(" ")
    text = planned(command, monkeypatch, capsys)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert python == "python" and "ray start" not in text
    assert f"--actor-num-nodes {group['replicas']} --actor-num-gpus-per-node {gpus} " in text


def test_the_slurm_script_runs_a_script_on_its_nodes(monkeypatch, capsys):
    text = SLURM.read_text()
    assert subprocess.run(["bash", "-n", str(SLURM)]).returncode == 0
    nodes = re.search(r"^#SBATCH --nodes=(\d+)", text, re.MULTILINE)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes[1])
    command = re.search(r'"\$MILES/(scripts/run_\w+\.py)" ((?:.*\\\n)*.*)', text)
    words = f"{command[1]} {command[2]}".replace("\\\n", " ").replace("${RUN_ID:-qwen3-235b}", "it").replace("$", "/")
    assert f"--actor-num-nodes {nodes[1]} --actor-num-gpus-per-node 8 " in planned(words, monkeypatch, capsys)
