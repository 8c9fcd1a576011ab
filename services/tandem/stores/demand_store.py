"""Publish each gateway's demand and service totals to the planners through Redis.

A record holds totals since its gateway process started, so a lost record loses nothing: the next record includes the
same counts. A planner computes differences between successive records of one gateway process.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from redis.exceptions import RedisError

from tandem.core.errors import ErrorKind
from tandem.core.ids import GatewayId
from tandem.stores.lua_script import Argument, Script, read_script
from tandem.stores.redis_client import connect
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


class DemandUnavailable(Exception):
    """Redis did not answer, or refused the command. The caller may retry later."""


@dataclass(slots=True)
class DemandTotals:
    """Counts of one model since the gateway process started.

    `num_requests` and `num_input_tokens` count at arrival; `num_served`, `num_cached_tokens` and `num_prefill_pairs` at
    the first token; all others at the end of a request. `num_prefill_pairs` sums, over prompts, the pairs (token
    computed, token it attends to).
    """

    num_requests: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_pairs: int = 0
    num_output_tokens: int = 0
    num_served: int = 0
    num_late_ttft: int = 0
    num_gaps: int = 0
    num_late_gaps: int = 0
    num_failed: int = 0

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

    num_requests: int = 0
    num_tokens: int = 0


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
            model: {"totals": asdict(totals), "backlog": asdict(self.backlog.get(model, QueueBacklog()))}
            for model, totals in self.totals.items()
        }
        lived = {"lived_s": self.lived_s} if math.isfinite(self.lived_s) else {}
        return json.dumps({"schema": SCHEMA, "models": models, **lived}, sort_keys=True)

    @classmethod
    def from_json(cls, gateway: str, text: bytes, age_s: float) -> DemandRecord:
        """Parse a stored record. Raises ValueError for a record that this version cannot read."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"not a demand record of schema {SCHEMA}")
        models = {model: entry for model, entry in _mapping(content, "models").items() if isinstance(entry, dict)}
        return cls(
            gateway=GatewayId(gateway),
            totals={model: DemandTotals(**_counts(entry, "totals", DemandTotals)) for model, entry in models.items()},
            backlog={model: QueueBacklog(**_counts(entry, "backlog", QueueBacklog)) for model, entry in models.items()},
            lived_s=_seconds(content, "lived_s"),
            age_s=age_s,
        )


class DemandStore:
    """Store of the gateways' demand records: gateways publish, planners read.

    `url` has a form that `tandem.stores.redis_client.connect` accepts. All methods but `close` raise
    DemandUnavailable.
    """

    def __init__(self, url: str, namespace: str, *, ttl_s: float = TTL_S, health: RedisHealth | None = None) -> None:
        self._redis = connect(url, store="demand", health=health)
        self._ttl_ms = round(ttl_s * 1000)
        # Redis Cluster hashes only the part in braces, so all keys share one slot.
        self._keys = [f"{{{namespace}:demand}}:{name}" for name in ("words", "said")]
        self._publish = Script(self._redis, read_script("demand"))
        self._read = Script(self._redis, read_script("demands"))
        self._unreadable: frozenset[bytes] = frozenset()

    async def publish(self, record: DemandRecord) -> None:
        """Replace the gateway's record. After an error nothing is lost, since the next record has the same totals."""
        await self._run(self._publish, [record.gateway, record.to_json(), self._ttl_ms])

    async def withdraw(self, gateway: GatewayId) -> None:
        """Delete the record of a gateway that shuts down, so that planners don't wait for the next one."""
        await self._run(self._publish, [gateway, "", self._ttl_ms])

    async def read(self) -> tuple[DemandRecord, ...]:
        """Return the records that have not lapsed, sorted by gateway, without those that this version cannot read."""
        flat = await self._run(self._read, [self._ttl_ms])
        found: list[DemandRecord] = []
        unreadable: set[bytes] = set()
        for gateway, text, age_ms in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            try:
                found.append(DemandRecord.from_json(gateway.decode(), text, int(age_ms) / 1000))
            except (ValueError, TypeError) as error:
                unreadable.add(gateway)
                if gateway not in self._unreadable:
                    _log.warning("the demand record of gateway %s is left out: %s", gateway.decode(), error)
        self._unreadable = frozenset(unreadable)
        return tuple(sorted(found, key=lambda record: record.gateway))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, script: Script, arguments: list[Argument]) -> Any:
        try:
            return await script(self._keys, arguments)
        except (RedisError, OSError) as error:
            raise DemandUnavailable(f"{type(error).__name__}: {error}") from error


def _mapping(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a mapping: {value!r}")
    return value


def _seconds(content: Mapping[str, Any], name: str) -> float:
    """Return a field in seconds; infinite if it is missing, since older versions do not write it."""
    value = content.get(name, math.inf)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{name} is not a time: {value!r}")
    return float(value)


def _counts(entry: Mapping[str, Any], name: str, kind: type) -> dict[str, int]:
    """Return the values of the dataclass `kind`'s fields; a missing field is 0, an unknown field is skipped."""
    counts = _mapping(entry, name)
    found = {known.name: counts.get(known.name, 0) for known in fields(kind)}
    for key, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{key} is not a count: {value!r}")
    return found
