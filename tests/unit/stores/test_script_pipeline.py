"""Test a script pipeline whose connection fails with an unexpected exception; tests of quotas cover the rest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.lua_script import ScriptPipeline
from tandem.stores.redis_client import RedisClient, StoreUnavailable


@pytest.mark.redis
async def test_any_failure_fails_the_waiting_calls_and_later_calls_succeed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedServer.start() as server:
        redis = RedisClient(server.url)
        calls, pipeline = ScriptPipeline(redis, "roll"), redis.redis.pipeline

        def fails(**_: Any) -> None:
            raise ValueError("unexpected")

        monkeypatch.setattr(redis.redis, "pipeline", fails)
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*(calls.call(["k"], [i, 60_000]) for i in range(2)), return_exceptions=True)
            assert [type(answer) for answer in answers] == [StoreUnavailable] * 2 and "unexpected" in str(answers[0])
            assert "Traceback" in caplog.text
            monkeypatch.setattr(redis.redis, "pipeline", pipeline)
            assert await calls.call(["k"], ["7", 60_000]) == 1
            await calls.close()
