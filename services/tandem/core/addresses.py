"""Classify listen addresses as loopback or wildcard, without resolving names, and format them."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or a loopback IP address; any other name counts as not loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Return whether `host` is an unspecified IP address (0.0.0.0 or ::). A server can listen on it, but must not
    advertise it to clients."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def host_of(address: str) -> str:
    """Return the host of an address `host:port`, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def format_host(host: str) -> str:
    """Format a host so that a port can follow: IPv6 addresses get brackets."""
    return f"[{host}]" if ":" in host else host
