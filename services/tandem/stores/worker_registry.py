"""The list of workers in Redis, for gateways to find them; never the judge of who is alive.

A worker that is missing here and answers is alive; one that is here and does not answer is not. All keys of the
registry share one hash slot, and each method is one script, so that it is atomic and works on Redis Cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from tandem.core.ids import WorkerRef
from tandem.stores.lua_script import Argument, Script, read_script
from tandem.stores.redis_client import connect
from tandem.stores.redis_health import RedisHealth
from tandem.stores.worker_record import RecordError, WorkerRecord

DEFAULT_TTL_S = 10.0
_LIFE_DIGITS = 20

_log = logging.getLogger(__name__)


class RegistryUnavailable(Exception):
    """Redis does not answer, or refuses; what it holds is unknown. Trying again later is right."""


@dataclass(frozen=True, slots=True)
class RegistryView:
    """The records by worker id. While Redis is not `reachable` they are the last ones it told."""

    records: tuple[WorkerRecord, ...]
    reachable: bool


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    """Of a life that is registered. `role`: what was set for it, empty where nothing was."""

    role: str


class _Known(NamedTuple):
    version: bytes
    records: tuple[WorkerRecord, ...]


class WorkerRegistry:
    """Publishes, withdraws and lists records, and sets roles. An entry lapses `ttl_s` seconds after it was last
    published, and its role with it.

    `url` as `tandem.stores.redis_client.connect` takes it. Nothing is sent before the first call of a method.
    """

    def __init__(
        self, url: str, namespace: str, *, ttl_s: float = DEFAULT_TTL_S, health: RedisHealth | None = None
    ) -> None:
        self.ttl_s = ttl_s
        self._redis = connect(url, store="registry", health=health)
        # Braces: Redis Cluster hashes only what is between them.
        self._keys = [f"{{{namespace}:workers}}:{name}" for name in ("records", "lapse", "version", "roles")]
        self._publish = Script(self._redis, read_script("publish"))
        self._withdraw = Script(self._redis, read_script("withdraw"))
        self._role = Script(self._redis, read_script("role"))
        self._list = Script(self._redis, read_script("list"))
        self._known = _Known(b"", ())
        self._unreadable: frozenset[bytes] = frozenset()

    async def publish(self, record: WorkerRecord) -> RegistrationStatus | None:
        """Register, or go on being registered. None when a later life of the worker holds its id.

        The whole record goes each time, so that a registry that lost it has it again; the role of the record counts
        only there, where it has been known before.
        """
        ttl_ms = round(self.ttl_s * 1000)
        is_held, role = await self._run(self._publish, [*_life(record.worker), record.to_json(), ttl_ms, record.role])
        return RegistrationStatus(role.decode(errors="replace")) if is_held else None

    async def set_role(self, worker: WorkerRef, role: str) -> bool:
        """What routers take this life for from now on, for as long as it is registered. False when it is not there."""
        return bool(await self._run(self._role, [*_life(worker), role]))

    async def withdraw(self, worker: WorkerRef) -> bool:
        """Take this life's entry out. False when it is not there."""
        return bool(await self._run(self._withdraw, _life(worker)))

    async def list(self) -> tuple[WorkerRecord, ...]:
        """All entries that have not lapsed, by worker id. Those that this version cannot read are left out.

        Redis sends them only when they have changed since the last call: with thousands of workers they are megabytes.
        """
        version, *changed = await self._run(self._list, [self._known.version])
        if changed:
            texts, roles = changed
            self._known = _Known(version, self._readable(texts, dict(zip(roles[::2], roles[1::2], strict=True))))
        return self._known.records

    def _readable(self, texts: Sequence[bytes], roles: Mapping[bytes, bytes]) -> tuple[WorkerRecord, ...]:
        """`roles`: worker id -> incarnation as 20 decimal digits, then its role."""
        found: list[WorkerRecord] = []
        unreadable: set[bytes] = set()
        for text in texts:
            try:
                found.append(_with_role(WorkerRecord.from_json(text), roles))
            except RecordError as error:
                unreadable.add(text)
                if text not in self._unreadable:
                    _log.warning("a record in the registry is left out: %s", error)
        self._unreadable = frozenset(unreadable)
        return tuple(sorted(found, key=lambda record: record.worker))

    async def watch(self, poll_s: float = 1.0) -> AsyncGenerator[RegistryView, None]:
        """The view now, then one per change, for ever. Being unreachable is a view, not an error.

        A poll and not a subscription: it needs no second connection, misses nothing, and costs one command of
        microseconds per gateway and second.
        """
        view: RegistryView | None = None
        while True:
            try:
                seen = RegistryView(await self.list(), reachable=True)
            except RegistryUnavailable as error:
                known = view.records if view else ()
                seen = RegistryView(known, reachable=False)
                if seen != view:
                    _log.warning("the worker registry is unreachable: %s", error)
            if seen != view:
                view = seen
                yield view
            await asyncio.sleep(poll_s)

    async def close(self) -> None:
        """Close the connections. Entries stay until they lapse."""
        await self._redis.aclose()

    async def _run(self, script: Script, arguments: Sequence[Argument]) -> Any:
        try:
            return await script(self._keys, arguments)
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(f"{type(error).__name__}: {error}") from error


def _life(worker: WorkerRef) -> tuple[str, str]:
    return worker.id, f"{worker.incarnation:0{_LIFE_DIGITS}d}"


def _with_role(record: WorkerRecord, roles: Mapping[bytes, bytes]) -> WorkerRecord:
    name, life = _life(record.worker)
    role = roles.get(name.encode(), b"").decode(errors="replace")
    return replace(record, role=role[_LIFE_DIGITS:]) if role.startswith(life) else record
