"""Publish through Redis how many workers of each role a planner has decided on, and how many each Ray Serve instance
deploys.

One planner at a time is the leader: the first that publishes, until it has published nothing for a while. Several Ray
Serve instances may run workers of one model, as during an upgrade to a new cluster: each publishes the number that it
intends to run, under its own id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import msgspec

from tandem.core.config import Count
from tandem.core.ids import PlannerId, ServeId
from tandem.stores.json_record import decode_record
from tandem.stores.lua_script import Argument, Script
from tandem.stores.redis_client import RedisClient, RedisHealth

SCHEMA = 1
"""Version of the record format; increase it when a field changes its meaning or is removed."""
TTL_S = 180.0
"""A target expires when it was not published for this many seconds."""
DEPLOYED_TTL_S = 30.0
"""The number of a Ray Serve instance expires when it was not published for this many seconds, and then counts as 0."""
OLDER_SERVE = ServeId("one of an older version")
"""Stands for a Ray Serve instance of an older version of Tandem, which publishes its numbers without its id."""
ROLES = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """Hold the numbers of workers of one model that a planner has decided on.

    `planner`: the planner that publishes them. `replicas`: number of workers by the role with which they were started;
    a worker whose role was changed later still counts under its first role. `reasons`: texts for operators. `minimums`:
    smallest number that the planner may decide on, by role; empty in a record of an older version.
    """

    model: str
    planner: PlannerId
    replicas: Mapping[str, Count]
    reasons: tuple[str, ...] = ()
    minimums: Mapping[str, Count] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the stored form of the record."""
        return msgspec.json.encode({"schema": SCHEMA, **asdict(self)}).decode()


class ReplicaTargets:
    """Keep in Redis the targets that planners publish, and the numbers of workers that each Ray Serve instance deploys
    for them.

    `hold_s`: seconds without a publication by the leading planner after which another may become the leader. `url`: as
    for `RedisClient`. `namespace`: prefix of the keys. `health`: receives the result of each command. All methods but
    `close` raise StoreUnavailable.
    """

    def __init__(self, url: str, namespace: str, *, hold_s: float = 15.0, health: RedisHealth | None = None) -> None:
        self._redis = RedisClient(url, store="targets", health=health)
        self.close = self._redis.aclose
        self._namespace = namespace
        self._hold_ms = round(hold_s * 1000)
        self._publish = Script(self._redis, "target")
        self._resign = Script(self._redis, "resign")
        self._deployed = Script(self._redis, "deployed")

    async def publish(self, record: TargetRecord) -> PlannerId:
        """Store the target `record` unless another planner is the leader for its model; return the leader.

        The leader is the caller itself if the target was stored. The target expires after `TTL_S` seconds unless it is
        published again.
        """
        arguments: list[Argument] = [record.planner, record.to_json(), round(TTL_S * 1000), self._hold_ms]
        leader = await self._publish(self._keys(record.model), arguments)
        return PlannerId(leader.decode())

    async def resign(self, model: str, planner: PlannerId) -> None:
        """Give up the leadership for a model, so that another planner can become the leader; the published target stays
        in force. Does nothing where `planner` is not the leader.
        """
        await self._resign(self._keys(model)[1:], [planner])

    async def read(self, model: str) -> TargetRecord | None:
        """Return the target of a model; None where there is none or this version cannot read it."""
        text = await self._redis.execute("GET", self._keys(model)[0])
        try:
            return None if text is None else decode_record(text, TargetRecord, SCHEMA)
        except ValueError:
            return None

    async def publish_deployed(self, model: str, role: str, serve: ServeId, number: int) -> None:
        """Publish that the Ray Serve instance `serve` intends to run `number` workers of a model in `role`.

        The number expires after `DEPLOYED_TTL_S` seconds unless it is published again.
        """
        arguments: list[Argument] = [f"{role} {serve}", number, round(DEPLOYED_TTL_S * 1000)]
        await self._deployed(self._deployed_keys(model), arguments)

    async def deployed(self, model: str) -> dict[str, dict[ServeId, int]]:
        """Return how many workers of a model each Ray Serve instance intends to run, as role -> instance id -> number.

        The numbers are those of `publish_deployed` that have not expired; a role without any is left out. The id
        `OLDER_SERVE` stands for an instance of an older version of Tandem."""
        flat = await self._deployed(self._deployed_keys(model), [""])
        older = await self._redis.execute("MGET", *self._older_keys(model))
        found: dict[str, dict[ServeId, int]] = {
            role: {OLDER_SERVE: int(number)} for role, number in zip(ROLES, older, strict=True) if number is not None
        }
        for key, number in zip(flat[::2], flat[1::2], strict=True):
            role, _, serve = key.decode().partition(" ")
            found.setdefault(role, {})[ServeId(serve)] = int(number)
        return found

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
