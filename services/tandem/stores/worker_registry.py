"""Keep the list of workers in Redis, from which gateways discover them.

The registry does not decide which workers are alive: a worker that answers is alive even if its entry is missing, and a
worker that does not answer is not, even if it has an entry. All keys of the registry share one hash slot, and each
method is one script, so that it is atomic and works on Redis Cluster. Load figures are not part of a worker's record;
gateways get these from the worker itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from tandem.core.config import Count
from tandem.core.ids import WorkerRef
from tandem.core.topology import Topology
from tandem.stores.json_record import decode_record
from tandem.stores.lua_script import Script
from tandem.stores.redis_client import RedisClient, RedisHealth, StoreUnavailable

SCHEMA = 1
"""Version of the record format; increase it when a field changes its meaning or is removed. A new field needs no
increase, since readers skip unknown fields."""
DEFAULT_TTL_S = 10.0
BEATS_PER_TTL = 3
_INCARNATION_DIGITS = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """Hold the description of one worker process for gateways: its identity, what it serves and where it runs.

    - `pool`: the role (prefill, decode or mixed) with which it was started. `role`: the role that an operator or
      planner has set for this incarnation, empty if none; the registry stores it separately.
    - `model`: name of the model that it serves. `max_model_len`: the most tokens of prompt and output together.
      `layout`: the KV layout as text for operators.
    - `fingerprint`: hash over weights, precision, tokenizer and block size. `bundle_digest`: hash over the tokenizer
      files. Both are hexadecimal.
    - `topology`: host, rack and zone. `lanes`: labels of the lanes whose requests gateways place on it, empty for all.
    """

    worker: WorkerRef
    pool: str
    model: str
    fingerprint: str
    layout: str
    max_model_len: Count
    bundle_digest: str
    role: str = ""
    topology: Topology = field(default_factory=Topology)
    lanes: tuple[str, ...] = ()

    @property
    def effective_role(self) -> str:
        """Return the role by which routers use this worker: `role`, or `pool` where that is empty."""
        return self.role or self.pool

    def to_json(self) -> str:
        """Return the stored form of the record: one flat object, without `role`, and without `host`, `rack`, `zone` and
        `lanes` where they are empty.
        """
        flat = asdict(self)
        worker = flat.pop("worker")
        labels = {name: label for name, label in flat.pop("topology").items() if label}
        labels |= {"lanes": lanes} if (lanes := flat.pop("lanes")) else {}
        del flat["role"]
        return msgspec.json.encode({"schema": SCHEMA, **worker, **flat, **labels}).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerRecord:
        """Parse a stored record, whose `role` is then empty. Raises ValueError where this version cannot read it."""
        flat = decode_record(text, dict[str, Any], SCHEMA)
        try:
            return msgspec.convert({**flat, "worker": flat, "topology": flat, "role": ""}, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None


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
        self.close = self._redis.aclose
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


async def keep_registered(registry: WorkerRegistry, record: WorkerRecord, on_role: Callable[[str], None]) -> None:
    """Publish a worker's record three times within the time to live of its entry, until the task is cancelled; then
    remove the entry if Redis is reachable.

    `on_role`: function that is called at each successful publication with the role by which routers use the worker.
    This is the role that an operator or planner has set, else the role of the worker's pool."""
    was_held: bool | None = None
    try:
        while True:
            is_held: bool | None = None  # Redis does not answer
            with suppress(StoreUnavailable):
                role = await registry.publish(record)
                is_held = role is not None
                if role is not None:
                    # The next publication restores the role in a registry that has lost its data.
                    record = replace(record, role=role)
                    on_role(record.effective_role)
            if is_held and not was_held:
                _log.info("worker %s is registered in Redis", record.worker)
            elif is_held is False and was_held is not False:  # two processes were given the same id
                _log.warning("worker %s gets no requests: a later worker with its id is registered", record.worker)
            was_held = is_held
            await asyncio.sleep(registry.ttl_s / BEATS_PER_TTL)
    finally:
        with suppress(StoreUnavailable):
            await registry.withdraw(record.worker)


def _ids(worker: WorkerRef) -> tuple[str, str]:
    """Return the worker id and its incarnation as 20 decimal digits, whose text order is their numeric order."""
    return worker.id, f"{worker.incarnation:0{_INCARNATION_DIGITS}d}"


def _with_role(record: WorkerRecord, roles: Mapping[bytes, bytes]) -> WorkerRecord:
    name, incarnation = _ids(record.worker)
    role = roles.get(name.encode(), b"").decode(errors="replace")
    return replace(record, role=role[_INCARNATION_DIGITS:]) if role.startswith(incarnation) else record
