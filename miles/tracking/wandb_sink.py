"""Weights & Biases."""

import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from miles.config import RunConfig
from miles.config.secrets import without_secrets
from miles.utils.errors import UserError, one_line

# What each family of metrics is drawn over.
AXES = {"train": "train/step", "critic-train": "train/step", "rollout": "rollout/step", "perf": "rollout/step"}
AXES["eval"] = "eval/step"


class WandbSink:
    """A run of W&B. `write` puts a step into a queue, which W&B sends on, and again where the network fails."""

    errors = (wandb.Error, OSError)

    def __init__(self, run: wandb.Run):
        self._run = run
        self.run_id = run.id
        for family, axis in AXES.items():
            run.define_metric(axis, hidden=True)
            run.define_metric(f"{family}/*", step_metric=axis)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row. W&B's own counter of rows is no axis: a resumed run writes steps anew."""
        self._run.log({**values, "rollout/step": step, "eval/step": step})

    def close(self, *, failed: bool) -> None:
        """Waits until all is sent."""
        self._run.finish(exit_code=int(failed))


def start(config: RunConfig, folder: Path, run_id: str | None) -> WandbSink:
    """Begin a run, or go on with that of `run_id`, unless --wandb-run-id names another.

    Raises:
        UserError: no key, or the server refuses it or does not answer.
    """
    run_id = config.wandb_run_id or run_id or secrets.token_hex(4)
    suffix = "" if config.disable_wandb_random_suffix else f"_{run_id}"
    files = Path(config.wandb_dir or folder)
    files.mkdir(parents=True, exist_ok=True)  # else W&B takes the machine's folder for temporary files
    settings = wandb.Settings(x_disable_meta=True)  # the metadata hold the command line, and that may hold a key
    if config.wandb_host is not None:
        settings.base_url = config.wandb_host
    try:
        run = wandb.init(
            mode=config.wandb_mode,
            dir=str(files),
            project=config.wandb_project,
            entity=config.wandb_team,
            group=config.wandb_group,
            name=config.wandb_group and config.wandb_group + suffix,
            id=run_id,
            resume="allow",
            config=without_secrets(config.model_dump()),
            settings=settings,
        )
    except wandb.Error as error:
        raise UserError(
            f"--use-wandb: {one_line(error)}; set WANDB_API_KEY, or log in with `wandb login`, or take --wandb-mode "
            "offline"
        ) from error
    return WandbSink(run)
