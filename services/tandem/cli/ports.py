"""Check before a program loads anything that the ports on which it is to listen differ and are free."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import NamedTuple

from tandem.core.addresses import format_host, is_wildcard
from tandem.core.errors import ErrorKind, TandemError


class PortSetting(NamedTuple):
    """A setting that names a port, with its flag and with the setting of its host. `port` 0 means any free port, and -1
    that nothing listens."""

    name: str
    flag: str
    host_name: str
    host: str
    port: int

    def overlaps(self, other: PortSetting) -> bool:
        """Return whether both would listen at one port of one address. The hosts `::` and empty stand for every
        address, and `0.0.0.0` for every IPv4 address."""
        has_address = self.host == other.host or self._covers(other.host) or other._covers(self.host)
        return has_address and self.port == other.port > 0

    def _covers(self, host: str) -> bool:
        """Return whether this host is a wildcard that includes `host`."""
        return not self.host or (is_wildcard(self.host) and (":" in self.host or ":" not in host))


def require_free_ports(settings: Sequence[PortSetting]) -> None:
    """Check that the ports differ and can be bound; raises TandemError(INVALID_REQUEST) if not."""
    for number, setting in enumerate(settings):
        # Two listeners that share a port would each get some of its connections.
        for other in settings[:number]:
            if setting.overlaps(other):
                message = f"{setting.name} {setting.port} is that of {other.name} too: choose another {setting.flag}"
                raise TandemError(ErrorKind.INVALID_REQUEST, message, param=setting.name)
        if setting.port >= 0:
            _require_free_port(setting)


def _require_free_port(setting: PortSetting) -> None:
    where = f"{format_host(setting.host)}:{setting.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            setting.host or None, setting.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        is_in_use = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice, param = f"choose another {setting.flag}", setting.name
        if not is_in_use:
            advice, param = f"set {setting.host_name} to an address of this machine", setting.host_name
        reason = getattr(error, "strerror", None) or error
        message = f"cannot listen on {where}: {reason}; {advice}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param=param) from error
