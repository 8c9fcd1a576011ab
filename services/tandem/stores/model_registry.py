"""Keep in Redis what gateways must know of a model to accept its requests while no worker serves it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import Count
from tandem.stores.json_record import decode_record
from tandem.stores.redis_client import RedisClient, RedisHealth

SCHEMA = 1
"""Version of the record format; increase it when a field changes its meaning or is removed."""
TTL_S = 30 * 86_400.0
"""All records are deleted when none was published for this many seconds."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """Description of a model, with which gateways can accept its requests while no worker serves it.

    `name`: the name that workers use. `aliases`: further names that clients may use. `max_model_len`: most tokens of
    prompt and output together. `bundle`: the files of its tokenizer, which take some megabytes.
    """

    name: str
    max_model_len: Count
    bundle: TokenizerBundle
    aliases: tuple[str, ...] = ()


class _Stored(msgspec.Struct):
    """JSON form of a record; bytes are in base64."""

    schema: int
    model: ModelRecord


class ModelRegistry:
    """Keep the records of models in Redis: gateways publish the records of the models that live workers serve, and read
    the records of all models when they start.

    `url`: as for `RedisClient`. `namespace`: prefix of the key. `health`: receives the result of each command. All
    methods but `close` raise StoreUnavailable.
    """

    def __init__(self, url: str, namespace: str, *, health: RedisHealth | None = None) -> None:
        self._redis = RedisClient(url, store="models", health=health)
        self.close = self._redis.aclose
        self._key = f"{{{namespace}:models}}"

    async def publish(self, record: ModelRecord) -> None:
        """Store the record of a model, and let all records stay for another `TTL_S` seconds."""
        text = msgspec.json.encode(_Stored(SCHEMA, record))
        await self._redis.execute("HSET", self._key, record.name, text)
        await self._redis.execute("PEXPIRE", self._key, round(TTL_S * 1000))

    async def read(self) -> tuple[ModelRecord, ...]:
        """Return the records of all models, sorted by name; those that this version cannot read are left out."""
        found: list[ModelRecord] = []
        for text in await self._redis.execute("HVALS", self._key):
            try:
                found.append(decode_record(text, _Stored, SCHEMA).model)
            except ValueError as error:
                _log.warning("a record of a model in Redis is ignored: %s", error)
        return tuple(sorted(found, key=lambda record: record.name))
