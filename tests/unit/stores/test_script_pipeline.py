"""A line of script calls whose connection fails in a way that nobody thought of; tests of quotas try the rest of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.redis_client import connect
from tandem.stores.script_pipeline import ScriptPipeline, StoreUnavailable


@pytest.mark.redis
async def test_who_waits_is_told_of_any_failure_and_the_line_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedServer.start() as server:
        redis = connect(server.url)
        line, pipeline = ScriptPipeline(redis, "return ARGV[1]"), redis.pipeline

        def fails(**_: Any) -> None:
            raise ValueError("unthought of")

        monkeypatch.setattr(redis, "pipeline", fails)
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*(line.call(["k"], [i]) for i in range(2)), return_exceptions=True)
            assert [type(answer) for answer in answers] == [StoreUnavailable] * 2 and "unthought of" in str(answers[0])
            assert "Traceback" in caplog.text
            monkeypatch.setattr(redis, "pipeline", pipeline)
            assert await line.call(["k"], ["7"]) == b"7"
            await line.close()
