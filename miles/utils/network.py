"""Ports and addresses."""

import errno
import ipaddress
import random
import socket
from collections.abc import Sequence

# Below the range from which Linux takes the ports of outgoing connections (32768 on): a port found free now is not
# taken by the next connection that some process opens.
PORTS = range(20000, 30000)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different TCP ports of `PORTS` that are free on `host` now, drawn at random; not reserved afterwards.

    Raises RuntimeError where there are fewer.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            return found
        if _is_free(host, port):
            found.append(port)
    raise RuntimeError(f"{host} has {len(found)} free ports from {PORTS.start} to {PORTS.stop - 1}, {count} are needed")


def free_port_block(count: int, ports: Sequence[int] = PORTS, host: str = "127.0.0.1") -> int:
    """The first of `count` consecutive TCP ports among `ports` that are free on `host` now; not reserved afterwards.

    The place is drawn at random. Raises RuntimeError where there is none.
    """
    starts = ports[: len(ports) - count + 1]
    for start in random.SystemRandom().sample(starts, len(starts)):
        if all(_is_free(host, port) for port in range(start, start + count)):
            return start
    raise RuntimeError(f"{host} has no {count} consecutive free ports from {ports[0]} to {ports[-1]}")


def port_slices(count: int, size: int) -> list[Sequence[int]]:
    """`count` runs of `size` consecutive ports of `PORTS`, from a random place on; none overlap while there are enough.

    For servers that look for free ports at the same time and open them later.
    """
    slices = [PORTS[start : start + size] for start in range(0, len(PORTS) - size + 1, size)]
    first = random.SystemRandom().randrange(len(slices))
    return [slices[(first + number) % len(slices)] for number in range(count)]


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """One TCP port that is free on `host` now."""
    return free_ports(1, host)[0]


def host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address: `[::1]:80`."""
    bare = host.strip("[]")
    try:
        is_v6 = ipaddress.ip_address(bare).version == 6
    except ValueError:  # a host name
        is_v6 = False
    return f"[{bare}]:{port}" if is_v6 else f"{bare}:{port}"
