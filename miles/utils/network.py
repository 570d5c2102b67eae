"""Ports and addresses."""

import ipaddress
import socket


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different TCP ports that are free on `host` now (the system's choice; not reserved after the return)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind((host, 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


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
