"""Reload the tenants file when it changes.

Files in a mounted Secret are symbolic links into a directory that is swapped as a whole, which a watch on the file does
not notice. So the file is polled by its name, which costs microseconds."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.tenants_file import Tenants, parse_tenants

POLL_S = 1.0
_Signature = tuple[int, ...]
log = logging.getLogger(__name__)


def read_tenants(path: Path, gateway_policy: str) -> Tenants:
    """Read and parse the tenants file; `gateway_policy` is the setting `gateway.disaggregation`.

    Raises TandemError(INVALID_REQUEST) where the file cannot be read or parsed, or where `gateway_policy` is `off` and
    the file sets another mode of disaggregation for a tenant."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TandemError(
            ErrorKind.INVALID_REQUEST, f"cannot read tenants file {path}: {reason}", param="gateway.tenants"
        ) from None
    tenants = parse_tenants(text, str(path))
    for tenant in tenants.tenants.values():
        if gateway_policy == "off" and tenant.disaggregation not in (None, "off"):
            place = f"{path}: tenants.{tenant.id}.disaggregation"
            message = f"{place} must be off, got {tenant.disaggregation}, because gateway.disaggregation is off"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.tenants")
    return tenants


class TenantsWatch:
    """Pass the new tenants to `authenticator` whenever the tenants file has changed, from `start` to `stop`.

    A file that cannot be read or parsed is logged and reported to `authenticator`, which keeps its tenants.
    `gateway_policy`: the setting `gateway.disaggregation`, as in `read_tenants`.
    """

    def __init__(self, path: Path, gateway_policy: str, authenticator: ApiKeyAuthenticator) -> None:
        self._path = path
        self._policy = gateway_policy
        self._authenticator = authenticator
        self._last_signature: _Signature | None = None
        loop = BackgroundLoop("the tenants file watch", self.poll)
        self.start = loop.start
        self.stop = loop.stop

    async def poll(self) -> float:
        """Read the file if it has changed since the last call, and return the seconds until the next call."""
        signature = _signature(self._path)
        if signature == self._last_signature:
            return POLL_S
        try:
            # In a thread: a large file takes longer than streams may stall.
            tenants = await asyncio.to_thread(read_tenants, self._path, self._policy)
        except TandemError as error:
            log.error("the gateway rejected the tenants file and keeps its last valid content: %s", error.message)
            self._authenticator.keep_after(f"tenants file rejected: {error.message}")
        else:
            self._authenticator.update(tenants)
            if self._last_signature is not None:
                message = "the gateway read %d tenants with %d keys from %s"
                log.info(message, len(tenants.tenants), len(tenants.keys), self._path)
        # Taken before the file was read, so that a change during the read is seen by the next poll.
        self._last_signature = signature
        return POLL_S


def _signature(path: Path) -> _Signature:
    """Return a value that changes with the file behind the name and with its content; empty where there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
