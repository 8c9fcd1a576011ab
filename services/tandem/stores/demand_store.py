"""What gateways were asked for and have answered, told to planners through Redis; never counts anything itself.

A record has the totals since its gateway began, so one that is lost loses nothing: the next one says it too. A planner
takes the differences, life by life.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from redis.exceptions import RedisError

from tandem.core.ids import GatewayId
from tandem.stores.lua_script import Argument, Script, read_script
from tandem.stores.redis_client import connect
from tandem.stores.redis_health import RedisHealth

SCHEMA = 1
"""Rises when a field changes its meaning or goes."""
TTL_S = 15.0
"""A gateway that says nothing for so long is forgotten."""

_log = logging.getLogger(__name__)


class DemandUnavailable(Exception):
    """Redis does not answer, or refuses. Trying again later is right."""


@dataclass(slots=True)
class DemandTotals:
    """Of one model, since the gateway began. Requests and input tokens count as they come; those that are served, what
    was cached of their inputs and the prefill pairs at the first token; the rest at the end. `num_prefill_pairs`: the
    sum over prompts of (token computed, token it attends to) pairs."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBacklog:
    """Requests of a model that have no place yet, and the tokens of their prompts, now."""

    num_requests: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandRecord:
    """The word of one life of a gateway, by model. `lived_s`: how long it had counted when it said so, infinite where
    it does not say. `age_s`: how long ago that was."""

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
        """Raises ValueError for what this version cannot read."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"not a demand record of schema {SCHEMA}")
        models = {model: word for model, word in _mapping(content, "models").items() if isinstance(word, dict)}
        return cls(
            gateway=GatewayId(gateway),
            totals={model: DemandTotals(**_counts(word, "totals", DemandTotals)) for model, word in models.items()},
            backlog={model: QueueBacklog(**_counts(word, "backlog", QueueBacklog)) for model, word in models.items()},
            lived_s=_seconds(content, "lived_s"),
            age_s=age_s,
        )


class DemandStore:
    """Where gateways tell it and planners read it. `url` as `tandem.stores.redis_client.connect` takes it."""

    def __init__(self, url: str, namespace: str, *, ttl_s: float = TTL_S, health: RedisHealth | None = None) -> None:
        self._redis = connect(url, store="demand", health=health)
        self._ttl_ms = round(ttl_s * 1000)
        # Braces: Redis Cluster hashes only what is between them.
        self._keys = [f"{{{namespace}:demand}}:{name}" for name in ("words", "said")]
        self._tell = Script(self._redis, read_script("demand"))
        self._read = Script(self._redis, read_script("demands"))
        self._unreadable: frozenset[bytes] = frozenset()

    async def tell(self, record: DemandRecord) -> None:
        """Raises DemandUnavailable, and then nothing is lost."""
        await self._run(self._tell, [record.gateway, record.to_json(), self._ttl_ms])

    async def withdraw(self, gateway: GatewayId) -> None:
        """Its life is over, and nobody is to wait for its word. Raises DemandUnavailable."""
        await self._run(self._tell, [gateway, "", self._ttl_ms])

    async def read(self) -> tuple[DemandRecord, ...]:
        """By gateway. Those that this version cannot read are left out. Raises DemandUnavailable."""
        flat = await self._run(self._read, [self._ttl_ms])
        found: list[DemandRecord] = []
        unreadable: set[bytes] = set()
        for gateway, text, age_ms in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            try:
                found.append(DemandRecord.from_json(gateway.decode(), text, int(age_ms) / 1000))
            except (ValueError, TypeError) as error:
                unreadable.add(gateway)
                if gateway not in self._unreadable:
                    _log.warning("what gateway %s says of demand is left out: %s", gateway.decode(), error)
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
        raise ValueError(f"{name} is no mapping: {value!r}")
    return value


def _seconds(content: Mapping[str, Any], name: str) -> float:
    """Infinite where it is missing: a version before this one does not say it."""
    value = content.get(name, math.inf)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{name} is no time: {value!r}")
    return float(value)


def _counts(word: Mapping[str, Any], name: str, kind: type) -> dict[str, int]:
    """What it has of the fields of a kind; one that is missing counts as 0, and one that is new is skipped."""
    told = _mapping(word, name)
    found = {one.name: told.get(one.name, 0) for one in fields(kind)}
    for key, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{key} is not a count: {value!r}")
    return found
