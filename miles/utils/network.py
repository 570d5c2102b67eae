"""Ports and addresses."""

import errno
import ipaddress
import random
import socket

# Below the range from which Linux takes the ports of outgoing connections (32768 on): a port found free now is not
# taken by the next connection that some process opens.
PORTS = range(20000, 30000)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different TCP ports of `PORTS` that are free on `host` now, drawn at random; not reserved afterwards.

    Raises RuntimeError where there are fewer.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            return found
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            try:
                sock.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        found.append(port)
    raise RuntimeError(f"{host} has {len(found)} free ports from {PORTS.start} to {PORTS.stop - 1}, {count} are needed")


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
