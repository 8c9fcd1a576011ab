"""Publish each gateway's demand and service totals to the planners through Redis.

A record holds totals since its gateway process started, so a lost record loses nothing: the next record includes the
same counts. A planner computes differences between successive records of one gateway process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tandem.core.config import NonNegative
from tandem.core.ids import GatewayId
from tandem.scaling.demand_totals import DemandTotals, QueueBacklog
from tandem.stores.json_record import decode_record
from tandem.stores.lua_script import Script
from tandem.stores.redis_client import RedisClient, RedisHealth

SCHEMA = 1
"""Version of the record format; increase it when a field changes its meaning or is removed."""
TTL_S = 15.0
"""A gateway's record is deleted when it was not published for this many seconds."""
_log = logging.getLogger(__name__)


class _StoredModel(msgspec.Struct):
    totals: DemandTotals
    backlog: QueueBacklog


class _Stored(msgspec.Struct, omit_defaults=True):
    """JSON form of a record. Older versions do not write `lived_s`, and JSON has no infinity."""

    schema: int
    models: dict[str, _StoredModel]
    lived_s: NonNegative | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandRecord:
    """Hold the counts that one gateway process reports to planners.

    `totals`: for each model, counts since the process started. `backlog`: for each model, the requests that wait for a
    placement now. `lived_s`: seconds that the process had been counting when it published the record; infinite where an
    older version wrote it. `age_s`: seconds since the publication, by the clock of the Redis server.
    """

    gateway: GatewayId
    totals: Mapping[str, DemandTotals]
    backlog: Mapping[str, QueueBacklog] = field(default_factory=dict)
    lived_s: float = math.inf
    age_s: float = 0.0

    def to_json(self) -> str:
        """Return the stored form of the record, without `gateway` and `age_s`."""
        models = {
            model: _StoredModel(totals, self.backlog.get(model, QueueBacklog()))
            for model, totals in self.totals.items()
        }
        lived_s = self.lived_s if math.isfinite(self.lived_s) else None
        return msgspec.json.encode(_Stored(SCHEMA, models, lived_s)).decode()

    @classmethod
    def from_json(cls, gateway: str, text: bytes, age_s: float) -> DemandRecord:
        """Parse the record of `gateway` that was published `age_s` seconds ago. Raises ValueError where this version
        cannot read it.
        """
        stored = decode_record(text, _Stored, SCHEMA)
        return cls(
            gateway=GatewayId(gateway),
            totals={model: entry.totals for model, entry in stored.models.items()},
            backlog={model: entry.backlog for model, entry in stored.models.items()},
            lived_s=math.inf if stored.lived_s is None else stored.lived_s,
            age_s=age_s,
        )


class DemandStore:
    """Keep the demand records of all gateways in Redis: gateways publish theirs, planners read all.

    `url`: as for `RedisClient`. `namespace`: prefix of the keys. `ttl_s`: seconds after which a record that was not
    published again is deleted. `health`: receives the result of each command. All methods but `close` raise
    StoreUnavailable.
    """

    def __init__(self, url: str, namespace: str, *, ttl_s: float = TTL_S, health: RedisHealth | None = None) -> None:
        self._redis = RedisClient(url, store="demand", health=health)
        self.close = self._redis.aclose
        self._ttl_ms = round(ttl_s * 1000)
        # Redis Cluster hashes only the part in braces, so all keys share one slot.
        self._keys = [f"{{{namespace}:demand}}:{name}" for name in ("words", "said")]
        self._publish = Script(self._redis, "demand")
        self._read = Script(self._redis, "demands")
        self._unreadable: frozenset[bytes] = frozenset()

    async def publish(self, record: DemandRecord) -> None:
        """Replace the demand record of the gateway that `record` names.

        After StoreUnavailable nothing is lost, because the next record has the same totals.
        """
        await self._publish(self._keys, [record.gateway, record.to_json(), self._ttl_ms])

    async def withdraw(self, gateway: GatewayId) -> None:
        """Delete the record of a gateway that shuts down, so that planners no longer count its requests."""
        await self._publish(self._keys, [gateway, "", self._ttl_ms])

    async def read(self) -> tuple[DemandRecord, ...]:
        """Return the current record of each gateway, sorted by gateway. Expired records, and those that this version
        cannot read, are left out.
        """
        flat = await self._read(self._keys, [self._ttl_ms])
        found: list[DemandRecord] = []
        unreadable: set[bytes] = set()
        for gateway, text, age_ms in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            try:
                found.append(DemandRecord.from_json(gateway.decode(), text, int(age_ms) / 1000))
            except ValueError as error:
                unreadable.add(gateway)
                if gateway not in self._unreadable:
                    _log.warning("the demand record of gateway %s is ignored: %s", gateway.decode(), error)
        self._unreadable = frozenset(unreadable)
        return tuple(sorted(found, key=lambda record: record.gateway))
