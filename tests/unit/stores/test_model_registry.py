"""Test the records of models on a real server."""

from __future__ import annotations

import pytest

from tandem.core.bundle import TokenizerBundle
from tandem.stores.model_registry import ModelRecord, ModelRegistry
from tandem.stores.redis_client import RedisClient

pytestmark = pytest.mark.redis
BUNDLE = TokenizerBundle(tokenizer_json=bytes(range(256)), chat_template="{{ x }}", special_tokens_json='{"a": 1}')


async def test_records_are_replaced_by_name_and_expire_together(redis_url: str) -> None:
    registry, key = ModelRegistry(redis_url, "models1"), "{models1:models}"
    assert await registry.read() == ()
    first = ModelRecord(name="org/b", max_model_len=7, bundle=BUNDLE, aliases=("c", "d"))
    await registry.publish(first)
    newer = ModelRecord(name="a", max_model_len=9, bundle=BUNDLE)
    for length in (8, 9):
        await registry.publish(ModelRecord(name="a", max_model_len=length, bundle=BUNDLE))
    assert await registry.read() == (newer, first)
    redis = RedisClient(redis_url)
    assert 29 * 86_400 < await redis.execute("TTL", key) <= 30 * 86_400
    await redis.aclose()
    await registry.close()


async def test_what_another_version_wrote_is_left_out(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    registry, redis = ModelRegistry(redis_url, "models2"), RedisClient(redis_url)
    for number, text in enumerate(("no json", '{"schema": 9}', '{"schema": 1, "model": {"name": "a"}}')):
        await redis.execute("HSET", "{models2:models}", str(number), text)
    await registry.publish(ModelRecord(name="m", max_model_len=7, bundle=BUNDLE))
    assert [record.name for record in await registry.read()] == ["m"]
    assert len([line for line in caplog.messages if "a record of a model in Redis is ignored" in line]) == 3
    await redis.aclose()
    await registry.close()
