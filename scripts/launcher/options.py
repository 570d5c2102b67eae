"""The options of every script, as Miles users know them; each is also an environment variable."""

import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from launcher.recipe import GPUS_OF_A_NODE
from launcher.tasks import TASKS
from miles.utils.errors import UserError

VARIABLES = "MILES_SCRIPT_"
AUTO = "auto"


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _run_id() -> str:
    return f"{datetime.now():%y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass
class Options:
    """What the user chose; a default of None is filled in by the recipe."""

    mode: Literal["normal", "debug_minimal"] = _option(
        "normal", "debug_minimal: three rollouts of few, short answers, to see that everything runs"
    )
    model_name: str | None = _option(None, "which of the script's models; unset: its first")
    task: Literal[tuple(TASKS)] | None = _option(None, "what is trained on; unset: the recipe's")  # type: ignore[valid-type]
    hardware: Literal[(AUTO, *GPUS_OF_A_NODE)] = _option(  # type: ignore[valid-type]
        AUTO, "kind of GPU; auto: what nvidia-smi names here, else that of the recipe's first layout"
    )
    num_nodes: int | None = _option(None, "nodes; unset: those of the SLURM job, else 1")
    rollout_num_nodes: int = _option(
        0, "of these, nodes for engines alone, the trainer having the others; 0: both share all nodes"
    )
    num_gpus_per_node: int | None = _option(None, "GPUs of a node; unset: as many as the hardware has")
    model_dir: Path = _option(Path("~/models"), "folder of checkpoints, one folder a model")
    model_local_dir: Path | None = _option(
        None, "folder on a disk of each node, where each that runs the script copies the checkpoint to; unset: none"
    )
    hf_checkpoint: Path | None = _option(None, "checkpoint to start from, instead of the one in --model-dir")
    data_dir: Path = _option(Path("~/datasets"), "folder of prompts, one folder a data set")
    output_dir: Path = _option(Path("~/shared_data"), "folder of runs, one folder a run: checkpoints, metrics, logs")
    run_id: str = field(
        default_factory=_run_id, metadata={"help": "name of the run; given again, the run goes on from its checkpoint"}
    )
    enable_eval: bool = _option(True, "evaluate with the task's held-out prompts (mode normal)")
    extra_args: str = _option("", "more flags of train.py, as one text; they win over the recipe's")
    extra_env_vars: str = _option("", "environment variables of the run: NAME=VALUE NAME=VALUE, or a JSON object")
    external_ray: bool = _option(False, "submit to the Ray that runs here already; so does RAY_ADDRESS, to its own")
    ray_port: int = _option(6379, "port of the Ray head that is started")
    dashboard_port: int = _option(8265, "port at which the Ray head takes jobs")
    dry_run: bool = _option(False, "print the commands, run none")

    def __post_init__(self) -> None:
        for name in ("model_dir", "model_local_dir", "hf_checkpoint", "data_dir", "output_dir"):
            path = getattr(self, name)
            setattr(self, name, path and path.expanduser().absolute())
        if self.num_nodes is None:
            self.num_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        if not 0 <= self.rollout_num_nodes < self.num_nodes:
            raise UserError(
                f"--rollout-num-nodes {self.rollout_num_nodes} of --num-nodes {self.num_nodes}: the trainer needs one "
                "at least; give fewer, or 0 where both share all nodes"
            )

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.output_dir / self.run_id


def variable_of(name: str) -> str:
    """The environment variable of an option: MILES_SCRIPT_NUM_NODES."""
    return VARIABLES + name.upper()


def hardware_here() -> str | None:
    """The kind of this machine's GPUs; None where there are none, or others."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(command, capture_output=True, text=True).stdout
    kinds = sorted(GPUS_OF_A_NODE, key=len, reverse=True)  # GB200 before B200
    return next((kind for kind in kinds if kind in names), None)
