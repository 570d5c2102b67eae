"""The Ray cluster of a run: one that is there, or one that is started and ended here, over the nodes of a SLURM job."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from launcher.plan import Plan
from launcher.prepare import copy_steps, run_steps
from miles.utils.errors import UserError

NODES_S = 1800.0  # until all nodes of a SLURM job have joined
WAIT_S = 1.0
CONNECT_S = 5.0


def address_to_join(plan: Plan) -> str | None:
    """Of a cluster that runs already: RAY_ADDRESS, or this machine's with --external-ray. None: one is started."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "local"):
        return address
    return dashboard_of(plan) if plan.options.external_ray else None


def dashboard_of(plan: Plan) -> str:
    """Where the head on this machine takes jobs."""
    return f"http://127.0.0.1:{plan.options.dashboard_port}"


def slurm_rank() -> int:
    """This node's number in the SLURM job; 0 outside of one."""
    return int(os.environ.get("SLURM_NODEID", "0"))


def slurm_head() -> str:
    """The first node of the SLURM job."""
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def resources(plan: Plan) -> dict[str, int]:
    """What a node has. Without GPUs, a logical CPU for each bundle at least: the operating system shares the cores."""
    if plan.hardware == "cpu":
        return {"num_gpus": 0, "num_cpus": max(os.cpu_count() or 1, plan.gpus_per_node)}
    return {"num_gpus": plan.gpus_per_node}


def head_command(plan: Plan) -> list[str]:
    """What `started` does, as a command that does the same."""
    ports = ["--port", str(plan.options.ray_port), "--dashboard-port", str(plan.options.dashboard_port)]
    return ["ray", "start", "--head", "--disable-usage-stats", *ports, *_as_words(plan)]


def worker_command(plan: Plan, head: str) -> list[str]:
    """Joins the head from another node; it ends with this command, or with the head."""
    ray = str(Path(sys.executable).with_name("ray"))
    return [ray, "start", "--address", f"{head}:{plan.options.ray_port}", "--block", *_as_words(plan)]


def _as_words(plan: Plan) -> list[str]:
    return [f"--{name.replace('_', '-')}={number}" for name, number in resources(plan).items()]


@contextlib.contextmanager
def started(plan: Plan) -> Iterator[tuple[str, str]]:
    """A head on this machine, with the SLURM job's other nodes, for the length of a run; it ends with this process.

    Yields:
        Where it takes jobs, and where processes join it.

    Raises:
        UserError: something else has its ports, or nodes are missing.
    """
    for port in (plan.options.ray_port, plan.options.dashboard_port):
        if _answers("127.0.0.1", port):
            raise UserError(
                f"port {port} is taken: where a Ray cluster runs here, join it with --external-ray; else give others "
                "with --ray-port and --dashboard-port"
            )
    print(shlex.join(head_command(plan)), flush=True)
    ports = [str(plan.options.ray_port), str(plan.options.dashboard_port)]
    rest = [str(plan.num_nodes), str(NODES_S), json.dumps(resources(plan))]
    command = [sys.executable, str(Path(__file__).with_name("head.py")), *ports, *rest]
    head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert head.stdin and head.stdout
    try:
        address = head.stdout.readline().strip()
        if not address:
            raise UserError(f"Ray's head did not come up: exit code {head.wait()}, and the reason above")
        if address.startswith("!"):
            raise UserError(
                f"{address[1:]} of --num-nodes {plan.num_nodes} have joined the Ray cluster within {NODES_S:.0f} s: "
                "start this script on each node of the SLURM job (srun), or start Ray by hand and give --external-ray"
            )
        yield dashboard_of(plan), address
    finally:
        head.stdin.close()
        head.wait()


def work_for(plan: Plan, head: str) -> None:
    """Give this node to the head of the cluster, as long as that is there."""
    while not _answers(head, plan.options.ray_port):  # until then it prepares
        time.sleep(WAIT_S)
    run_steps(copy_steps(plan), plan.options.dry_run)
    command = worker_command(plan, head)
    print(shlex.join(command), flush=True)
    subprocess.run(command)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), CONNECT_S):
            return True
    except OSError:
        return False
