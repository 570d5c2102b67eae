"""Ray's head in a process of its own: `head.py RAY_PORT DASHBOARD_PORT NODES SECONDS RESOURCES`, until its input ends.

It prints the head's address when NODES nodes have joined within SECONDS; else, how many have, after a `!`.
RESOURCES is JSON. The process has a session of its own, for Ray's dashboard ends where Ctrl-C reaches it, and with it
the only one who can end a job.
"""

import functools
import json
import os
import sys
import time

# A machine that is busy takes longer than Ray's half minute to start what answers at the dashboard.
os.environ |= {
    "RAY_GCS_SERVER_PORT": sys.argv[1],
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "300",
}
import ray  # noqa: E402 (it reads them)
from ray._private.parameter import RayParams  # noqa: E402

# The port of the agent that starts jobs. ray.init has no argument for it, and gives all Rays of a machine the same one:
# the second's agent then starts no job. 0: any that is free.
RayParams.__init__ = functools.partialmethod(RayParams.__init__, dashboard_agent_listen_port=0)


def joined(nodes: int, seconds: float) -> int:
    """Nodes that are there, at the latest after so many seconds."""
    deadline = time.monotonic() + seconds
    while (there := sum(node["Alive"] for node in ray.nodes())) < nodes and time.monotonic() < deadline:
        time.sleep(1)
    return there


def main() -> None:
    dashboard_port, nodes, seconds = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    ray.init(
        address="local",
        include_dashboard=True,
        dashboard_port=dashboard_port,
        log_to_driver=False,
        **json.loads(sys.argv[5]),
    )
    try:
        there = joined(nodes, seconds)
        print(ray.get_runtime_context().gcs_address if there >= nodes else f"!{there}", flush=True)
        sys.stdin.read()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
