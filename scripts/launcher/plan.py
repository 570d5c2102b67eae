"""What a script will do: the recipe with the user's choices, and the command line of train.py that follows."""

import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from launcher.options import AUTO, Options, hardware_here
from launcher.recipe import GPUS_OF_A_NODE, Flags, Layout, Model, Recipe, words
from launcher.tasks import TASKS, Task
from miles.config.secrets import is_secret
from miles.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

# Every recipe's, where it does not say otherwise.
COMMON: Flags = {
    "num_rollout": 3000,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "global_batch_size": 256,
    "rollout_shuffle": True,
    "use_dynamic_batch_size": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "advantage_estimator": "grpo",
    "eps_clip_high": 0.28,
    "lr": 1e-6,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
}
DEBUG_MINIMAL: Flags = {
    "num_rollout": 3,
    "rollout_batch_size": 8,
    "global_batch_size": 64,
    "rollout_max_response_len": 256,
    "over_sampling_batch_size": None,
    "dynamic_sampling_filter_path": None,
}


@dataclass(frozen=True)
class Plan:
    """A recipe with the user's choices."""

    recipe: Recipe
    options: Options
    model: Model
    layout: Layout
    hardware: str
    num_nodes: int
    gpus_per_node: int
    task: Task

    @classmethod
    def of(cls, recipe: Recipe, options: Options) -> "Plan":
        """Fill in what the user left open. Raises UserError where the recipe has nothing for these choices."""
        model = recipe.model(options.model_name)
        hardware = options.hardware
        if hardware == AUTO:
            hardware = hardware_here() or model.layouts[0].hardware[0]
        nodes = options.num_nodes or 1
        gpus = options.num_gpus_per_node or GPUS_OF_A_NODE[hardware]
        layout = model.layout(hardware, nodes - options.rollout_num_nodes, gpus)
        return cls(recipe, options, model, layout, hardware, nodes, gpus, TASKS[options.task or recipe.task])

    @property
    def downloaded(self) -> Path:
        """The Hugging Face folder on the disk that all nodes see."""
        return self.options.hf_checkpoint or self.options.model_dir / self.model.name

    @property
    def checkpoint(self) -> Path:
        """The Hugging Face folder that the run reads: `downloaded`, or each node's own copy of it."""
        local = self.options.model_local_dir
        return local / self.downloaded.name if local else self.downloaded

    def data_file(self, folder: str, path: str) -> Path:
        """Where a file of prompts is."""
        return self.options.data_dir / folder / path

    def flags(self) -> Flags:
        """The flags of train.py, but for --extra-args; later ones win."""
        evaluates = self.options.enable_eval and self.options.mode == "normal"
        flags = {**COMMON, **self._places(), **self._layout(), **self._task(evaluates)}
        flags |= {**self.recipe.flags, **self.model.flags, **self.layout.flags}
        if self.options.mode == "debug_minimal":
            flags |= DEBUG_MINIMAL
        return flags

    def train_command(self) -> list[str]:
        """train.py with all its flags."""
        return [sys.executable, str(ROOT / "train.py"), *words(self.flags()), *shlex.split(self.options.extra_args)]

    def environment(self) -> dict[str, str]:
        """Variables of the run. Secrets are not among them: they reach it from the environment of the Ray nodes."""
        return {"PYTHONUNBUFFERED": "1", **environment_of(self.options.extra_env_vars)}

    def _places(self) -> Flags:
        checkpoints = str(self.options.run_dir / "checkpoints")
        return {
            "hf_checkpoint": str(self.checkpoint),
            "load": checkpoints,
            "save": checkpoints,
            "save_interval": 20,
            "run_dir": str(self.options.run_dir),
            "use_wandb": True if "WANDB_API_KEY" in os.environ else None,
        }

    def _layout(self) -> Flags:
        layout, rollout_nodes = self.layout, self.options.rollout_num_nodes
        side = {"rollout_num_gpus": rollout_nodes * self.gpus_per_node} if rollout_nodes else {"colocate": True}
        return {
            "actor_num_nodes": self.num_nodes - rollout_nodes,
            "actor_num_gpus_per_node": self.gpus_per_node,
            "num_gpus_per_node": self.gpus_per_node,
            **side,
            "tensor_model_parallel_size": layout.tp,
            "sequence_parallel": True if layout.tp > 1 else None,
            "pipeline_model_parallel_size": layout.pp,
            "decoder_first_pipeline_num_layers": layout.first_stage_layers,
            "decoder_last_pipeline_num_layers": layout.last_stage_layers,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "max_tokens_per_gpu": layout.max_tokens_per_gpu,
            "rollout_num_gpus_per_engine": layout.engine_gpus,
            "sglang_mem_fraction_static": layout.engine_memory,
        }

    def _task(self, evaluates: bool) -> Flags:
        task = self.task
        flags = {"prompt_data": str(self.data_file(task.train.folder, task.train.path)), **task.flags}
        if evaluates and task.evaluation:
            name, file = task.evaluation
            flags |= {"eval_prompt_data": (name, str(self.data_file(file.folder, file.path))), "eval_interval": 20}
            flags |= task.eval_flags
        return flags


def environment_of(text: str) -> dict[str, str]:
    """--extra-env-vars: a JSON object, or NAME=VALUE in words.

    Raises:
        UserError: it is neither, or holds a secret, which would be seen in lists of processes and of Ray's jobs.
    """
    try:
        if text.lstrip().startswith("{"):
            variables = {str(name): str(value) for name, value in json.loads(text).items()}
        else:
            variables = dict(word.split("=", 1) for word in shlex.split(text))
    except ValueError as error:
        raise UserError(f"--extra-env-vars {text}: write NAME=VALUE NAME=VALUE or a JSON object ({error})") from error
    if secret := next((name for name in variables if is_secret(name)), None):
        raise UserError(
            f"--extra-env-vars names {secret}, which would stand in lists of processes and jobs for others to read; "
            "set it in the environment before this script, or before `ray start` on each node"
        )
    return variables
