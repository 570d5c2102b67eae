"""MLflow."""

import os
import time
from collections.abc import Iterator, Mapping
from itertools import batched
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from miles.config import RunConfig
from miles.config.secrets import without_secrets
from miles.utils.errors import UserError, one_line

MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000  # that a server takes at once


class MlflowSink:
    """A run of MLflow, whose steps are those of rollouts."""

    errors = (MlflowException, OSError)

    def __init__(self, client: MlflowClient, run_id: str):
        self._client = client
        self.run_id = run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """As few requests as the server allows."""
        now = int(time.time() * 1000)
        for part in batched(values.items(), MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=[Metric(name, value, now, step) for name, value in part])

    def close(self, *, failed: bool) -> None:
        """The run gets the state FINISHED or FAILED."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def start(config: RunConfig, folder: Path, run_id: str | None) -> MlflowSink:
    """Begin a run, or go on with that of `run_id`, unless --mlflow-run-id names another.

    Raises:
        UserError: the server does not answer, or refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    uri = config.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    run_id = config.mlflow_run_id or run_id
    try:
        client = MlflowClient(tracking_uri=uri)
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            return MlflowSink(client, run_id)
        experiment = client.get_experiment_by_name(config.mlflow_experiment_name)
        experiment_id = (
            client.create_experiment(config.mlflow_experiment_name) if experiment is None else experiment.experiment_id
        )
        run = client.create_run(experiment_id, run_name=config.mlflow_run_name or config.wandb_group or folder.name)
        for params in batched(_params(without_secrets(config.model_dump())), MOST_PARAMS):
            client.log_batch(run.info.run_id, params=params)
    except (MlflowException, OSError) as error:
        raise UserError(f"--use-mlflow: {one_line(error)}") from error
    return MlflowSink(client, run.info.run_id)


def _params(values: Mapping[str, Any]) -> Iterator[Param]:
    yield from (Param(name, str(value)[:LONGEST_PARAM]) for name, value in values.items())
