"""Reads the tenants file again when it has changed; never says what a tenant may do.

Files in a mounted Secret are symbolic links into a directory that is swapped as a whole, which no watch of the file
itself sees. So the file is looked for by its name, over and over; that costs microseconds.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.supervise import log_and_continue
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.tenants_file import Tenants, parse_tenants

POLL_S = 1.0
_Signature = tuple[int, ...]
log = logging.getLogger(__name__)


def read_tenants(path: Path, gateway_policy: str) -> Tenants:
    """Raises TandemError(INVALID_REQUEST), also where a tenant wants its requests split by a gateway that never
    does (`gateway.disaggregation=off`)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TandemError(ErrorKind.INVALID_REQUEST, f"cannot read {path}: {reason}", param="gateway.tenants") from None
    tenants = parse_tenants(text, str(path))
    for tenant in tenants.tenants.values():
        if gateway_policy == "off" and tenant.disaggregation not in (None, "off"):
            place = f"{path}: tenants.{tenant.id}.disaggregation"
            message = f"{place}: {tenant.disaggregation} cannot be where the gateway's is off"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.tenants")
    return tenants


class TenantsWatch:
    """Keeps `door` at what the file says. A file that cannot be read leaves it as it is, and is complained about."""

    def __init__(self, path: Path, gateway_policy: str, door: ApiKeyAuthenticator) -> None:
        self._path = path
        self._policy = gateway_policy
        self._door = door
        self._seen: _Signature | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_forever(), name="tenants-file")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Read the file if it is another one than at the last look."""
        signature = _signature(self._path)
        if signature == self._seen:
            return
        try:
            # A large file takes longer than streams may stand still.
            tenants = await asyncio.to_thread(read_tenants, self._path, self._policy)
        except TandemError as error:
            log.error("the tenants file is not taken, the last good one goes on to hold: %s", error.message)
            self._door.keep(f"the tenants file is not taken: {error.message}")
        else:
            self._door.update(tenants)
            if self._seen is not None:
                log.info("%d tenants with %d keys in %s", len(tenants.tenants), len(tenants.keys), self._path)
        # Of before it was read: what was written meanwhile is read at the next look.
        self._seen = signature

    async def _look_forever(self) -> None:
        while True:
            async with log_and_continue("the look at the tenants file"):
                await self.look()
                await asyncio.sleep(POLL_S)


def _signature(path: Path) -> _Signature:
    """Changes when the name stands for another file, or the file for another content; empty where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
