"""train.py as a Ray job: submitted, followed, and ended by Ctrl-C."""

import asyncio
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.plan import Plan
from miles.utils.errors import INTERRUPTED, UserError

STOP_S = 60.0
AGENT_S = 180.0
WAIT_S = 0.5


def entrypoint(plan: Plan, head: str | None = None) -> str:
    """The shell command of the job. Relative paths mean what they mean here.

    Args:
        head: of the cluster. Ray names one to a job by itself, but the wrong one where several run on a machine.
    """
    cluster = f"RAY_ADDRESS={head} " if head else ""
    return f"cd {shlex.quote(str(Path.cwd()))} && {cluster}exec {shlex.join(plan.train_command())}"


def submit_command(plan: Plan, address: str, head: str | None = None) -> str:
    """What `submit` does, as a command that does the same."""
    runtime = json.dumps({"env_vars": plan.environment()})
    words = ["ray", "job", "submit", "--address", address, "--runtime-env-json", runtime, "--"]
    return shlex.join([*words, "bash", "-c", entrypoint(plan, head)])


def submit(plan: Plan, address: str, head: str | None = None) -> None:
    """Run train.py on the cluster at `address` and print its output. SIGINT and SIGTERM end it.

    Raises:
        UserError: the cluster takes no jobs, or the run failed.
        SystemExit: it was interrupted.
    """
    from ray.job_submission import JobStatus

    print(submit_command(plan, address, head), flush=True)
    client, job = _submitted(plan, address, head)
    try:
        with _terminating():
            asyncio.run(_follow(client, job))
            while not (status := client.get_job_status(job)).is_terminal():
                time.sleep(WAIT_S)
    except KeyboardInterrupt:
        print(f"ending {job}", file=sys.stderr, flush=True)
        client.stop_job(job)
        deadline = time.monotonic() + STOP_S
        while not client.get_job_status(job).is_terminal() and time.monotonic() < deadline:
            time.sleep(WAIT_S)
        sys.exit(INTERRUPTED)
    if status != JobStatus.SUCCEEDED:
        raise UserError(f"the run ended as {status}: {client.get_job_info(job).message}")


def _submitted(plan: Plan, address: str, head: str | None) -> tuple[Any, str]:
    """A client of the cluster, and the job's name."""
    from ray.job_submission import JobSubmissionClient
    from requests import RequestException

    deadline = time.monotonic() + AGENT_S
    while True:
        try:
            client = JobSubmissionClient(address)
            environment = {"env_vars": plan.environment()}
            return client, client.submit_job(entrypoint=entrypoint(plan, head), runtime_env=environment)
        except (ConnectionError, RuntimeError, RequestException) as error:
            # What starts jobs on a node comes up after the head's dashboard.
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise UserError(f"the Ray cluster at {address} takes no job: {error}") from error
        time.sleep(WAIT_S)


async def _follow(client, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)


@contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM, by which SLURM and Kubernetes end a run, is Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
