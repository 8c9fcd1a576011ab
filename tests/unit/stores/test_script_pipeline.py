"""Test a script pipeline whose connection fails with an unexpected exception; tests of quotas cover the rest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.redis_client import connect
from tandem.stores.script_pipeline import ScriptPipeline, StoreUnavailable


@pytest.mark.redis
async def test_any_failure_fails_the_waiting_calls_and_later_calls_succeed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedServer.start() as server:
        redis = connect(server.url)
        calls, pipeline = ScriptPipeline(redis, "return ARGV[1]"), redis.pipeline

        def fails(**_: Any) -> None:
            raise ValueError("unexpected")

        monkeypatch.setattr(redis, "pipeline", fails)
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*(calls.call(["k"], [i]) for i in range(2)), return_exceptions=True)
            assert [type(answer) for answer in answers] == [StoreUnavailable] * 2 and "unexpected" in str(answers[0])
            assert "Traceback" in caplog.text
            monkeypatch.setattr(redis, "pipeline", pipeline)
            assert await calls.call(["k"], ["7"]) == b"7"
            await calls.close()
