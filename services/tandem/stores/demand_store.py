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

from tandem.core.config import Count, NonNegative
from tandem.core.errors import ErrorKind
from tandem.core.ids import GatewayId
from tandem.stores.json_record import decode_record
from tandem.stores.lua_script import Script
from tandem.stores.redis_client import RedisClient
from tandem.stores.redis_health import RedisHealth

SCHEMA = 1
"""Version of the record format; increase it when a field changes its meaning or is removed."""
TTL_S = 15.0
"""A gateway's record is dropped when it has not been published for this long."""
NO_ROOM = frozenset(
    kind.value for kind in (ErrorKind.OVERLOADED, ErrorKind.SLO_MISS, ErrorKind.NO_WORKER, ErrorKind.DEADLINE)
)
"""Requests that ended so would have been served by more workers."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DemandTotals:
    """Counts of one model since the gateway process started.

    `num_requests` and `num_input_tokens` count at arrival; `num_served`, `num_cached_tokens` and `num_prefill_pairs` at
    the first token; all others at the end of a request. `num_prefill_pairs` sums, over prompts, the pairs (token
    computed, token it attends to).
    """

    num_requests: Count = 0
    num_input_tokens: Count = 0
    num_cached_tokens: Count = 0
    num_prefill_pairs: Count = 0
    num_output_tokens: Count = 0
    num_served: Count = 0
    num_late_ttft: Count = 0
    num_gaps: Count = 0
    num_late_gaps: Count = 0
    num_failed: Count = 0

    def add_arrival(self, num_prompt: int) -> None:
        self.num_requests += 1
        self.num_input_tokens += num_prompt

    def add_prompt(self, num_prompt: int, num_cached: int) -> None:
        """Count a prompt that was computed, of which `num_cached` tokens came out of a cache."""
        num_new = num_prompt - num_cached
        self.num_served += 1
        self.num_cached_tokens += num_cached
        self.num_prefill_pairs += num_new * num_cached + num_new * (num_new + 1) // 2

    def add_end(self, outcome: str, *, is_late: bool, num_output: int, num_gaps: int, num_late_gaps: int) -> None:
        """Count an end. `outcome`: the kind of its error or why it finished; `is_late`: its first token was."""
        self.num_output_tokens += num_output
        self.num_gaps += num_gaps
        self.num_late_gaps += num_late_gaps
        if outcome in NO_ROOM:
            self.num_failed += 1
        elif outcome != ErrorKind.CANCELLED.value:
            self.num_late_ttft += is_late


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBacklog:
    """Requests of one model that are not placed on a worker yet, and the number of tokens in their prompts."""

    num_requests: Count = 0
    num_tokens: Count = 0


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
    """Demand that one gateway process reports, by model.

    `lived_s`: for how many seconds the gateway had been counting when it published the record, infinite if the record
    does not have the field. `age_s`: seconds since the record was published, by the clock of the Redis server.
    """

    gateway: GatewayId
    totals: Mapping[str, DemandTotals]
    backlog: Mapping[str, QueueBacklog] = field(default_factory=dict)
    lived_s: float = math.inf
    age_s: float = 0.0

    def to_json(self) -> str:
        models = {
            model: _StoredModel(totals, self.backlog.get(model, QueueBacklog()))
            for model, totals in self.totals.items()
        }
        lived_s = self.lived_s if math.isfinite(self.lived_s) else None
        return msgspec.json.encode(_Stored(SCHEMA, models, lived_s)).decode()

    @classmethod
    def from_json(cls, gateway: str, text: bytes, age_s: float) -> DemandRecord:
        """Parse a stored record. Raises ValueError for a record that this version cannot read."""
        stored = decode_record(text, _Stored, SCHEMA)
        return cls(
            gateway=GatewayId(gateway),
            totals={model: entry.totals for model, entry in stored.models.items()},
            backlog={model: entry.backlog for model, entry in stored.models.items()},
            lived_s=math.inf if stored.lived_s is None else stored.lived_s,
            age_s=age_s,
        )


class DemandStore:
    """Store of the gateways' demand records: gateways publish, planners read.

    `url` has a form that `RedisClient` accepts. All methods but `close` raise StoreUnavailable.
    """

    def __init__(self, url: str, namespace: str, *, ttl_s: float = TTL_S, health: RedisHealth | None = None) -> None:
        self._redis = RedisClient(url, store="demand", health=health)
        self._ttl_ms = round(ttl_s * 1000)
        # Redis Cluster hashes only the part in braces, so all keys share one slot.
        self._keys = [f"{{{namespace}:demand}}:{name}" for name in ("words", "said")]
        self._publish = Script(self._redis, "demand")
        self._read = Script(self._redis, "demands")
        self._unreadable: frozenset[bytes] = frozenset()

    async def publish(self, record: DemandRecord) -> None:
        """Replace the gateway's record. After an error nothing is lost, since the next record has the same totals."""
        await self._publish(self._keys, [record.gateway, record.to_json(), self._ttl_ms])

    async def withdraw(self, gateway: GatewayId) -> None:
        """Delete the record of a gateway that shuts down, so that planners don't wait for the next one."""
        await self._publish(self._keys, [gateway, "", self._ttl_ms])

    async def read(self) -> tuple[DemandRecord, ...]:
        """Return the records that have not lapsed, sorted by gateway, without those that this version cannot read."""
        flat = await self._read(self._keys, [self._ttl_ms])
        found: list[DemandRecord] = []
        unreadable: set[bytes] = set()
        for gateway, text, age_ms in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            try:
                found.append(DemandRecord.from_json(gateway.decode(), text, int(age_ms) / 1000))
            except ValueError as error:
                unreadable.add(gateway)
                if gateway not in self._unreadable:
                    _log.warning("the demand record of gateway %s is left out: %s", gateway.decode(), error)
        self._unreadable = frozenset(unreadable)
        return tuple(sorted(found, key=lambda record: record.gateway))

    async def close(self) -> None:
        await self._redis.aclose()
