"""Publish through Redis how many workers of each role a planner wants, and how many each Ray Serve deploys.

One planner at a time is the leader: the first that publishes, until it has not published for a while. Several Ray Serve
instances may run workers of one model, as during an upgrade to a new cluster: each publishes the number that it
intends to run, under its own id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec

from tandem.core.config import Count
from tandem.core.ids import PlannerId, ServeId
from tandem.stores.json_record import decode_record
from tandem.stores.lua_script import Argument, Script
from tandem.stores.redis_client import RedisClient
from tandem.stores.redis_health import RedisHealth

SCHEMA = 1
"""Version of the record format; increase it when a field changes its meaning or is removed."""
TTL_S = 180.0
"""A target lapses when it has not been published for this long."""
DEPLOYED_TTL_S = 30.0
"""A Serve's number lapses, and counts as no workers, when it has not been published for this long."""
OLDER_SERVE = ServeId("one of an older version")
"""Stands for a Serve of an older version, which publishes its numbers without its id."""
ROLES = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """Number of workers that a planner wants for one model.

    `replicas`: target by the role with which a pool's workers were started; a worker whose role was changed later
    still counts in its pool. `reasons`: text for operators.
    """

    model: str
    planner: PlannerId
    replicas: Mapping[str, Count]
    reasons: tuple[str, ...] = ()

    def to_json(self) -> str:
        return msgspec.json.encode({"schema": SCHEMA, **asdict(self)}).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> TargetRecord:
        """Parse a stored target. Raises ValueError for a record that this version cannot read."""
        return decode_record(text, cls, SCHEMA)


class ReplicaTargets:
    """Store of targets (written by planners) and of deployed numbers (written by each Ray Serve).

    `hold_s`: another planner may become the leader when the current one has not published for this long. `url` has a
    form that `RedisClient` accepts. All methods but `close` raise StoreUnavailable.
    """

    def __init__(self, url: str, namespace: str, *, hold_s: float = 15.0, health: RedisHealth | None = None) -> None:
        self._redis = RedisClient(url, store="targets", health=health)
        self._namespace = namespace
        self._hold_ms = round(hold_s * 1000)
        self._publish = Script(self._redis, "target")
        self._resign = Script(self._redis, "resign")
        self._deployed = Script(self._redis, "deployed")

    async def publish(self, record: TargetRecord) -> PlannerId:
        """Publish a target if no other planner is the leader; returns the leader, whose target counts."""
        arguments: list[Argument] = [record.planner, record.to_json(), round(TTL_S * 1000), self._hold_ms]
        leader = await self._publish(self._keys(record.model), arguments)
        return PlannerId(leader.decode())

    async def resign(self, model: str, planner: PlannerId) -> None:
        """Give up leadership for a model; the published target stays in force."""
        await self._resign(self._keys(model)[1:], [planner])

    async def read(self, model: str) -> TargetRecord | None:
        """Return a model's target; None if there is none or this version cannot read it."""
        text = await self._redis.execute("GET", self._keys(model)[0])
        try:
            return None if text is None else TargetRecord.from_json(text)
        except ValueError:
            return None

    async def publish_deployed(self, model: str, role: str, serve: ServeId, number: int) -> None:
        """Publish how many workers of a role `serve` intends to run; lapses after `DEPLOYED_TTL_S`."""
        arguments: list[Argument] = [f"{role} {serve}", number, round(DEPLOYED_TTL_S * 1000)]
        await self._deployed(self._deployed_keys(model), arguments)

    async def deployed(self, model: str) -> dict[str, dict[ServeId, int]]:
        """Return the number of workers that each Serve intends to run, by role; roles without a number are absent."""
        flat = await self._deployed(self._deployed_keys(model), [""])
        older = await self._redis.execute("MGET", *self._older_keys(model))
        found: dict[str, dict[ServeId, int]] = {
            role: {OLDER_SERVE: int(number)} for role, number in zip(ROLES, older, strict=True) if number is not None
        }
        for key, number in zip(flat[::2], flat[1::2], strict=True):
            role, _, serve = key.decode().partition(" ")
            found.setdefault(role, {})[ServeId(serve)] = int(number)
        return found

    async def close(self) -> None:
        await self._redis.aclose()

    def _keys(self, model: str) -> list[str]:
        return [f"{self._prefix(model)}:{part}" for part in ("replicas", "planner")]

    def _deployed_keys(self, model: str) -> list[str]:
        return [f"{self._prefix(model)}:serves:{part}" for part in ("numbers", "lapse")]

    def _older_keys(self, model: str) -> list[str]:
        return [f"{self._prefix(model)}:deployed:{role}" for role in ROLES]

    def _prefix(self, model: str) -> str:
        """Return the key prefix of a model, with braces escaped: they would end the part that Redis Cluster hashes."""
        name = model.replace("%", "%25").replace("{", "%7b").replace("}", "%7d")
        return f"{{{self._namespace}:target:{name}}}"
