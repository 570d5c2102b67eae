"""RAY_ADDRESS of a cluster that cannot be joined. Ray itself is not started here."""

import http.server
import socket
import threading
import time

import pytest

from miles.config import RunConfig
from miles.ray import cluster
from miles.utils.errors import UserError
from miles.utils.network import free_port

pytestmark = pytest.mark.real


@pytest.fixture
def join(monkeypatch):
    """Join a cluster by an address; returns what a user is told. Ray's part of it does what it is given."""

    def run(address, init=lambda: pytest.fail("Ray was asked to join")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(cluster.ray, "init", init)
        with pytest.raises(UserError, match=f"RAY_ADDRESS={address}") as caught:
            with cluster.session(RunConfig.model_construct(device="cpu")):
                pass
        return str(caught.value)

    return run


def test_a_head_that_does_not_answer_is_named_within_seconds(join):
    start, port = time.monotonic(), free_port()
    said = join(f"127.0.0.1:{port}")
    assert "no Ray cluster answers at" in said and f":{port} ([Errno 111] Connection refused): start one with" in said
    assert time.monotonic() - start < cluster.ANSWER_TIMEOUT_S + 5


def test_a_head_that_takes_no_connections_is_given_up(join, monkeypatch):
    monkeypatch.setattr(cluster, "ANSWER_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        monkeypatch.setattr(cluster, "canonicalize_bootstrap_address", lambda address: address)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:  # they fill the queue of connections that nobody accepts
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        assert f"no Ray cluster answers at 127.0.0.1:{port} (timed out)" in join(f"127.0.0.1:{port}")
        for one in waiting:
            one.close()


def test_another_service_is_told_from_a_head(join):
    class Refusing(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("0.0.0.0", 0), Refusing) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        said = join(f"127.0.0.1:{server.server_port}")
    assert "is no head of a Ray cluster (its port is 6379 unless given otherwise; 8265 is the dashboard's)" in said


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("head.invalid:6379", "no Ray cluster answers at head.invalid:6379"),
        ("head", "names no Ray cluster: Invalid address format: head"),
        ("ray://head:10001", "by the address of the head, as HOST:6379, or by auto; from outside submit it as a job"),
        ("http://head:8265", "by the address of the head, as HOST:6379, or by auto; from outside submit it as a job"),
    ],
)
def test_other_addresses_say_what_to_do(join, address, message):
    assert message in join(address)


def test_auto_where_no_cluster_is(join, monkeypatch):
    def find(address):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(cluster, "canonicalize_bootstrap_address", find)
    assert "Could not find any running Ray instance.; start one with `ray start --head`" in join("auto")


def test_a_cluster_of_other_versions(join, monkeypatch):
    def init():
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0")

    monkeypatch.setattr(cluster, "speaks_grpc", lambda address: True)
    said = join("127.0.0.1:6379", init)
    assert "can't be joined from this machine and this environment: Version mismatch" in said and "Ray: 2.9.0" in said
