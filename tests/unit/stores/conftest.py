"""What tests of stores share: a namespace of each test, and a client of the server."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tandem.stores.redis_client import RedisClient

_numbers = itertools.count()


@pytest.fixture
def namespace() -> str:
    return f"stores{next(_numbers)}"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = RedisClient(redis_url).redis
    yield client
    await client.aclose()
