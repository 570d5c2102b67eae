"""What a run leaves behind, who else is told its metrics, and the seed."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.effect import OnlyWith
from miles.config.paths import OutputFolder
from miles.config.section import Section, warning
from miles.config.values import Values

WITH_WANDB, WITH_MLFLOW = OnlyWith("--use-wandb"), OnlyWith("--use-mlflow")


class TrackingConfig(Section):
    title: ClassVar[str] = "Tracking and seed"

    run_dir: OutputFolder | None = Field(
        None,
        description="Folder of metrics.jsonl, TensorBoard files and logs. Unset: runs/, the time of the start and a "
        "number of its own.",
    )
    use_tensorboard: bool = Field(True, description="Write TensorBoard files.")
    use_wandb: bool = Field(
        False, description="Log to Weights & Biases. The key is that of WANDB_API_KEY, or of `wandb login`."
    )
    wandb_mode: Annotated[Literal["online", "offline", "disabled"] | None, WITH_WANDB] = Field(
        None, description="offline: into files, for `wandb sync`. Unset: WANDB_MODE, else online."
    )
    wandb_project: Annotated[str | None, WITH_WANDB] = Field(
        None, min_length=1, description="Unset: WANDB_PROJECT, else W&B's own default."
    )
    wandb_group: Annotated[str | None, WITH_WANDB] = Field(
        None, min_length=1, description="Group of the run, and the beginning of its name."
    )
    disable_wandb_random_suffix: Annotated[bool, OnlyWith("--wandb-group")] = Field(
        False, description="The run's name is that of its group, without its id behind it."
    )
    wandb_team: Annotated[str | None, WITH_WANDB] = Field(
        None, min_length=1, description="Team or user (W&B's entity). Unset: WANDB_ENTITY, else the key's own."
    )
    wandb_host: Annotated[str | None, WITH_WANDB] = Field(
        None, min_length=1, description="Address of a W&B server of your own. Unset: WANDB_BASE_URL, else wandb.ai."
    )
    wandb_dir: Annotated[OutputFolder | None, WITH_WANDB] = Field(
        None, description="Folder of W&B's files. Unset: that of the run."
    )
    wandb_run_id: Annotated[str | None, WITH_WANDB] = Field(
        None,
        pattern=r"^[\w-]+$",
        description="Run that is gone on with. Unset: with --load that of the same --run-dir, else a new one.",
    )
    wandb_key: Annotated[str | None, WITH_WANDB] = Field(
        None, description="Not read, since a command line is seen by everybody on the machine: set WANDB_API_KEY."
    )
    use_mlflow: bool = Field(False, description="Log to MLflow.")
    mlflow_tracking_uri: Annotated[str | None, WITH_MLFLOW] = Field(
        None, min_length=1, description="Unset: MLFLOW_TRACKING_URI, else mlflow.db in the run's folder."
    )
    mlflow_experiment_name: Annotated[str, WITH_MLFLOW] = Field("miles", min_length=1, description="Experiment.")
    mlflow_run_name: Annotated[str | None, WITH_MLFLOW] = Field(
        None, min_length=1, description="Unset: --wandb-group, else the name of the run's folder."
    )
    mlflow_run_id: Annotated[str | None, WITH_MLFLOW] = Field(
        None,
        min_length=1,
        description="Run that is gone on with. Unset: with --load that of the same --run-dir, else a new one.",
    )
    use_trackio: bool = Field(
        False, description="Log to trackio: a database in TRACKIO_DIR, else in trackio/ of the run's folder."
    )
    trackio_project: Annotated[str, OnlyWith("--use-trackio")] = Field("miles", min_length=1, description="Project.")
    seed: int = Field(1234, ge=0, description="Seed of the trainer and the engines.")


@warning
def _key(v: Values) -> Iterator[str]:
    if v.wandb_key is not None:
        yield (
            "--wandb-key is not read, and everybody on this machine can see it on the command line: the key is that of "
            "WANDB_API_KEY, or of `wandb login`"
        )
