"""How many workers of each role there should be, as a planner says it through Redis; never decides it.

One planner at a time: the first that speaks is heard until it has been silent for a while. Several Serves may have
workers of one model, as in an upgrade to a new cluster: each says what it means to have, under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from tandem.core.ids import PlannerId, ServeId
from tandem.stores.lua_script import Argument, Script, read_script
from tandem.stores.redis_client import connect
from tandem.stores.redis_health import RedisHealth

SCHEMA = 1
"""Rises when a field changes its meaning or goes."""
TTL_S = 180.0
"""A target that nobody has said again for so long is none."""
DEPLOYED_TTL_S = 30.0
"""A Serve that says nothing for so long has no workers."""
OLDER_SERVE = ServeId("one of an older version")
"""It says its numbers, but not who it is."""
ROLES = ("prefill", "decode", "mixed")


class TargetsUnavailable(Exception):
    """Redis does not answer, or refuses. Trying again later is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """Of one model. `replicas` by the role of a pool, as its workers were started: a worker that has another role than
    its pool counts where it was started. `reasons` are for people."""

    model: str
    planner: PlannerId
    replicas: Mapping[str, int]
    reasons: tuple[str, ...] = ()

    def to_json(self) -> str:
        content = {
            "schema": SCHEMA,
            "model": self.model,
            "planner": self.planner,
            "replicas": dict(self.replicas),
            "reasons": list(self.reasons),
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str | bytes) -> TargetRecord:
        """Raises ValueError for what this version cannot read."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"not a target of schema {SCHEMA}")
        replicas = content.get("replicas")
        if not isinstance(replicas, dict) or not all(_is_count(number) for number in replicas.values()):
            raise ValueError(f"replicas are no counts by role: {replicas!r}")
        reasons = content.get("reasons", [])
        if not isinstance(reasons, list):
            raise ValueError(f"reasons are no list: {reasons!r}")
        return cls(
            model=str(content.get("model")),
            planner=PlannerId(str(content.get("planner"))),
            replicas=replicas,
            reasons=tuple(map(str, reasons)),
        )


class ReplicaTargets:
    """`hold_s`: after so much silence of a planner another one is heard. `url` as `tandem.stores.redis_client.connect`
    takes it. Methods raise TargetsUnavailable."""

    def __init__(self, url: str, namespace: str, *, hold_s: float = 15.0, health: RedisHealth | None = None) -> None:
        self._redis = connect(url, store="targets", health=health)
        self._namespace = namespace
        self._hold_ms = round(hold_s * 1000)
        self._say = Script(self._redis, read_script("target"))
        self._resign = Script(self._redis, read_script("resign"))
        self._deployed = Script(self._redis, read_script("deployed"))

    async def publish(self, record: TargetRecord) -> PlannerId:
        """Returns the planner whose word counts: another one's was taken where it is not the record's."""
        arguments: list[Argument] = [record.planner, record.to_json(), round(TTL_S * 1000), self._hold_ms]
        held = await self._run(self._say(self._keys(record.model), arguments))
        return PlannerId(held.decode())

    async def resign(self, model: str, planner: PlannerId) -> None:
        """Leave it to another one; what was said holds on."""
        await self._run(self._resign(self._keys(model)[1:], [planner]))

    async def read(self, model: str) -> TargetRecord | None:
        """None: nobody says one, or in words that this version does not know."""
        text = await self._run(self._redis.execute_command("GET", self._keys(model)[0]))
        try:
            return None if text is None else TargetRecord.from_json(text)
        except ValueError:
            return None

    async def tell_deployed(self, model: str, role: str, serve: ServeId, number: int) -> None:
        """Said by who starts workers of that role: how many it means to have. It lapses soon."""
        arguments: list[Argument] = [f"{role} {serve}", number, round(DEPLOYED_TTL_S * 1000)]
        await self._run(self._deployed(self._deployed_keys(model), arguments))

    async def deployed(self, model: str) -> dict[str, dict[ServeId, int]]:
        """The number by role and by Serve, of those roles of which somebody has said it."""
        flat = await self._run(self._deployed(self._deployed_keys(model), [""]))
        older = await self._run(self._redis.execute_command("MGET", *self._older_keys(model)))
        found: dict[str, dict[ServeId, int]] = {
            role: {OLDER_SERVE: int(number)} for role, number in zip(ROLES, older, strict=True) if number is not None
        }
        for who, number in zip(flat[::2], flat[1::2], strict=True):
            role, _, serve = who.decode().partition(" ")
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
        """A brace in a model's name would end what Redis Cluster hashes."""
        name = model.replace("%", "%25").replace("{", "%7b").replace("}", "%7d")
        return f"{{{self._namespace}:target:{name}}}"

    async def _run(self, command: Any) -> Any:
        try:
            return await command
        except (RedisError, OSError) as error:
            raise TargetsUnavailable(f"{type(error).__name__}: {error}") from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
