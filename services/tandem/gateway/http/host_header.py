"""Read the host that a request names, and decide whether the gateway answers for it.

A web page whose name resolves to 127.0.0.1 on its second lookup (DNS rebinding) reaches a gateway on the visitor's
machine, and the browser lets the page read the answers. Such a request names the page's host, for which the gateway
does not answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import httptools

from tandem.core.addresses import is_loopback
from tandem.core.errors import invalid_request

_HOST = re.compile(rb"(\[[0-9a-fA-F:.]+\]|(?:[-\w.~!$&'()*+,;=]|%[0-9a-fA-F]{2})*)(?::[0-9]*)?")
"""The value of a header Host (RFC 9110, 7.2): a name or an address, and optionally a port."""


def requested_host(headers: Sequence[tuple[bytes, bytes]], target: bytes, http_version: str) -> str:
    """Return the name or address that a request is for, in lower case, without its port, the brackets of an IPv6
    address and a dot at its end; empty where the request names none.

    `headers`: names in lower case, and values. `target`: as in the request line; the host in `http://host/path` takes
    precedence. Raises TandemError(INVALID_REQUEST) where the header Host is invalid, repeated, or missing in HTTP/1.1
    (RFC 9112, 3.2)."""
    values = [value for name, value in headers if name == b"host"]
    if len(values) > 1 or (not values and http_version >= "1.1"):
        number = len(values) or "no"
        raise invalid_request(f"the request has {number} headers Host: send one", "host")
    found = _HOST.fullmatch(values[0] if values else b"")
    if found is None:
        raise invalid_request("the header Host is invalid: send a name or an address, and optionally a port", "host")
    in_target = None if target.startswith(b"/") else httptools.parse_url(target).host
    host = found[1] if in_target is None else in_target
    return host.decode("ascii").lower().strip("[]").removesuffix(".")


class AllowedHosts:
    """Decide which hosts a listener answers for.

    `patterns`: names and addresses as `requested_host` returns them; `*.example.com`, for all names below example.com;
    `*`, for every host. Loopback names and addresses are always allowed, because a browser resolves them itself."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._allows_all = "*" in patterns
        self._names = frozenset(("localhost", *patterns))
        self._suffixes = tuple(pattern[1:] for pattern in patterns if pattern.startswith("*."))

    @classmethod
    def of(cls, host: str, patterns: Sequence[str]) -> AllowedHosts:
        """Return the hosts that a listener at `host` answers for, by the setting `gateway.allowed_hosts` (`patterns`):
        those that match a pattern, and `host` itself. Without patterns, a listener at a loopback address answers only
        for loopback names, and any other listener for every host."""
        if patterns:
            return cls([*patterns, host.lower()])
        return cls([host.lower()] if is_loopback(host) else ["*"])

    def allow(self, name: str, address: str) -> bool:
        """Return whether requests for the host `name` are answered.

        An empty `name` is allowed, because no browser sends one. `address`: the local address of the connection;
        requests that name it are allowed too, because no page of another server has it as its name."""
        return (
            self._allows_all
            or not name
            or name in self._names
            or name == address
            or name.endswith(self._suffixes)
            or is_loopback(name)
        )


EVERY_HOST = AllowedHosts(["*"])
