"""Keep the list of workers in Redis, from which gateways discover them.

The registry does not decide which workers are alive: a worker that answers is alive even if its entry is missing, and a
worker that does not answer is not, even if it has an entry. All keys of the registry share one hash slot, and each
method is one script, so that it is atomic and works on Redis Cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tandem.core.ids import WorkerRef
from tandem.stores.lua_script import Script
from tandem.stores.redis_client import RedisClient, RedisHealth
from tandem.stores.worker_record import WorkerRecord

DEFAULT_TTL_S = 10.0
_INCARNATION_DIGITS = 20

_log = logging.getLogger(__name__)


class WorkerRegistry:
    """Keep the list of workers in Redis: workers publish their records, gateways list them, and operators or planners
    set roles.

    An entry and its role expire `ttl_s` seconds after the entry was last published. `url`: as for `RedisClient`.
    `namespace`: prefix of the keys. `health`: receives the result of each command. Connects at the first call. All
    methods but `close` raise StoreUnavailable.
    """

    def __init__(
        self, url: str, namespace: str, *, ttl_s: float = DEFAULT_TTL_S, health: RedisHealth | None = None
    ) -> None:
        self.ttl_s = ttl_s
        self._redis = RedisClient(url, store="registry", health=health)
        # Redis Cluster hashes only the part in braces, so all keys share one slot.
        self._keys = [f"{{{namespace}:workers}}:{name}" for name in ("records", "lapse", "version", "roles")]
        self._publish = Script(self._redis, "publish")
        self._withdraw = Script(self._redis, "withdraw")
        self._role = Script(self._redis, "role")
        self._list = Script(self._redis, "list")
        self._version = b""
        self._records: tuple[WorkerRecord, ...] = ()
        self._unreadable: frozenset[bytes] = frozenset()

    async def publish(self, record: WorkerRecord) -> str | None:
        """Register a worker or renew its entry, and return the role that `set_role` has set for it, empty if none.

        Each call sends the whole record. Returns None, and changes nothing, while a later incarnation of the worker id
        is registered. `record.role` is ignored if the registry has an entry of this incarnation. If it has none,
        because the entry has expired or Redis has lost its data, `record.role` becomes the worker's role unless the
        registry stores a role for this incarnation.
        """
        ttl_ms = round(self.ttl_s * 1000)
        is_held, role = await self._publish(self._keys, [*_ids(record.worker), record.to_json(), ttl_ms, record.role])
        return str(role.decode(errors="replace")) if is_held else None

    async def set_role(self, worker: WorkerRef, role: str) -> bool:
        """Set the role in which routers use this incarnation of a worker; the role expires with the worker's entry.

        Returns False, and changes nothing, where this incarnation has no entry.
        """
        return bool(await self._role(self._keys, [*_ids(worker), role]))

    async def withdraw(self, worker: WorkerRef) -> bool:
        """Remove the entry of this incarnation of a worker and return True. Returns False where it has none."""
        return bool(await self._withdraw(self._keys, _ids(worker)))

    async def list(self) -> tuple[WorkerRecord, ...]:
        """Return the records that have not expired, sorted by worker id; those that this version cannot read are left
        out.

        Redis sends the records only if they have changed since the last call, because those of thousands of workers are
        megabytes.
        """
        version, *changed = await self._list(self._keys, [self._version])
        if changed:
            texts, roles = changed
            self._records = self._readable(texts, dict(zip(roles[::2], roles[1::2], strict=True)))
            self._version = version
        return self._records

    def _readable(self, texts: Sequence[bytes], roles: Mapping[bytes, bytes]) -> tuple[WorkerRecord, ...]:
        """Parse records, and log once each that cannot be read. `roles`: worker id -> incarnation as 20 decimal digits,
        then the role."""
        found: list[WorkerRecord] = []
        unreadable: set[bytes] = set()
        for text in texts:
            try:
                found.append(_with_role(WorkerRecord.from_json(text), roles))
            except ValueError as error:
                unreadable.add(text)
                if text not in self._unreadable:
                    _log.warning("a worker in the registry is ignored, because its record is unreadable: %s", error)
        self._unreadable = frozenset(unreadable)
        return tuple(sorted(found, key=lambda record: record.worker))

    async def close(self) -> None:
        """Close the connections. Entries stay until they expire."""
        await self._redis.aclose()


def _ids(worker: WorkerRef) -> tuple[str, str]:
    """Return the worker id and its incarnation as 20 decimal digits, whose text order is their numeric order."""
    return worker.id, f"{worker.incarnation:0{_INCARNATION_DIGITS}d}"


def _with_role(record: WorkerRecord, roles: Mapping[bytes, bytes]) -> WorkerRecord:
    name, incarnation = _ids(record.worker)
    role = roles.get(name.encode(), b"").decode(errors="replace")
    return replace(record, role=role[_INCARNATION_DIGITS:]) if role.startswith(incarnation) else record
