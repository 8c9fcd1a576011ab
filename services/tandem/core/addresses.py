"""What an address to listen at says of who can reach it; never resolves a name."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """A name that is not `localhost` could be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Every address of a machine, and none that others could be told."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
