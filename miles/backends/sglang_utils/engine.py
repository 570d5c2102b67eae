"""The Ray actor that holds one SGLang server."""

from pathlib import Path

import ray

from miles.backends.sglang_utils.arguments import HOST, command_line, server_arguments, server_environment
from miles.backends.sglang_utils.server_process import ServerProcess
from miles.config import RunConfig
from miles.utils.network import free_ports, host_port


class SGLangEngine:
    """Starts, watches and ends one server. The actor itself needs next to no CPU or memory: it imports no torch.

    Args:
        config: the run's configuration.
        engine_rank: number of this engine, from 0; names its log `<run_dir>/logs/engine_<rank>.log`.
        gpu_ids: physical ids of the GPUs of the server; empty on a CPU.
    """

    def __init__(self, config: RunConfig, engine_rank: int, gpu_ids: list[int]) -> None:
        self._config = config
        self._rank = engine_rank
        self._gpu_ids = gpu_ids
        self._server: ServerProcess | None = None

    def start(self) -> str:
        """Start the server, wait until it is healthy and return its URL. A failed start leaves no process behind."""
        assert self._server is None, f"engine {self._rank} was started before"
        port, nccl_port, grpc_port = free_ports(3, HOST)
        url = "http://" + host_port(HOST, port)
        arguments = server_arguments(self._config, engine_rank=self._rank, port=port, nccl_port=nccl_port)
        self._server = ServerProcess(
            command_line(arguments),
            server_environment(self._config, engine_rank=self._rank, gpu_ids=self._gpu_ids, grpc_port=grpc_port),
            Path(self._config.run_dir) / "logs" / f"engine_{self._rank}.log",
            url + "/health",
        )
        try:
            self._server.start()
            self._server.wait_healthy(self._config.rollout_engine_start_timeout)
        except BaseException:
            self.shutdown()
            raise
        return url

    def check(self) -> None:
        """Raise `ServerDied`, with the tail of the log, if the server isn't running."""
        assert self._server is not None, f"engine {self._rank} was not started"
        self._server.check()

    def shutdown(self) -> None:
        """End the server and all its processes; a second call does nothing."""
        if self._server is not None:
            self._server.terminate()

    def node_ip(self) -> str:
        """Address of the node that the engine runs on."""
        return ray.util.get_node_ip_address()
