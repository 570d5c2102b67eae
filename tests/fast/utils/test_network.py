import socket

import pytest

from miles.utils.network import PORTS, free_port_block, free_ports, host_port, port_slices
from tests.fast import conftest


def test_free_ports_differ():
    assert len(set(free_ports(20))) == 20


def test_tests_draw_from_ports_that_no_program_and_no_other_worker_draws_from():
    drawn = free_ports(50)
    assert set(drawn) <= set(conftest.PORTS) and not set(drawn) & set(PORTS)
    assert {port % 2 for port in drawn} == {conftest.WORKER % 2}


def test_a_block_of_ports_goes_round_one_that_is_taken():
    first = free_port_block(4)
    assert {first, first + 3} <= set(PORTS)
    with socket.create_server(("127.0.0.1", first + 1)):
        assert {free_port_block(2, range(first, first + 4)) for _ in range(20)} == {first + 2}
        with pytest.raises(RuntimeError, match=f"no 3 consecutive free ports from {first} to {first + 3}"):
            free_port_block(3, range(first, first + 4))


def test_slices_of_ports_do_not_overlap():
    for _ in range(20):
        slices = port_slices(64, 100)
        assert len({port for ports in slices for port in ports}) == 6400
        assert all(len(ports) == 100 == ports[-1] - ports[0] + 1 and set(ports) <= set(PORTS) for ports in slices)
    assert len(port_slices(150, 100)) == 150


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("[::1]", "[::1]:80"), ("node-3", "node-3:80")],
)
def test_host_port(host, expected):
    assert host_port(host, 80) == expected
