"""Find out whether any program still listens at a TCP address."""

from __future__ import annotations

import asyncio
import ipaddress
import socket


async def refuses_connections(address: str, timeout_s: float) -> bool:
    """Connect to `address`, host:port, and return whether the connection is refused. Where no firewall and no load
    balancer answers for the host, this shows that no program listens there any more.

    A stopped or overloaded program does not refuse: its kernel accepts connections for it. Returns False where the
    connection opens, where the host does not answer within `timeout_s` seconds or cannot be found, and where one of
    several addresses of the host does not refuse.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            hosts = await _resolve(host.strip("[]"), int(port))
            return all([await _refuses(each, int(port)) for each in hosts])
    except (OSError, TimeoutError, ValueError):
        return False


async def _resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host. An address is returned as it is; a name is looked up on a thread of the event
    loop's pool, which may be busy."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(place[0]) for *_, place in found]


async def _refuses(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False
