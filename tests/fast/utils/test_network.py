import pytest

from miles.utils.network import free_ports, host_port


def test_free_ports_differ():
    assert len(set(free_ports(20))) == 20


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("[::1]", "[::1]:80"), ("node-3", "node-3:80")],
)
def test_host_port(host, expected):
    assert host_port(host, 80) == expected
