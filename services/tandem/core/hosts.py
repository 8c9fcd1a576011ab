"""Which hosts only this machine can reach; never resolves a name."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """A name that is not `localhost` could be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
