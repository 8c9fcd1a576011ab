"""Test the HTTP server inside another program's loop: ports, and how responses under way end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from tandem.core.config import GatewayConfig
from tandem.gateway.app import GatewayApp
from tandem.gateway.context.interfaces import AllowAll
from tandem.gateway.http.server import HttpServer

Front = Any  # the fixtures' class lives in conftest


def test_a_port_in_use_is_reported_at_once(front: Front) -> None:
    with pytest.raises(OSError, match="in use"):
        HttpServer(None, "127.0.0.1", front.port)


def test_stopping_a_server_that_never_started_frees_its_port() -> None:
    server = HttpServer(None, "127.0.0.1", 0)
    asyncio.run(server.stop())
    again = HttpServer(None, "127.0.0.1", server.port)
    assert again.port == server.port
    asyncio.run(again.stop())


def test_an_ipv6_address() -> None:
    try:
        server = HttpServer(None, "::1", 0)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    assert server.port > 0
    asyncio.run(server.stop())


@pytest.mark.parametrize("grace", ["enough", pytest.param("too short", marks=pytest.mark.slow)])
async def test_stopping_lets_streams_end_or_sends_them_an_error(
    front: Front, caplog: pytest.LogCaptureFixture, grace: str
) -> None:
    gate = asyncio.Event()
    tokens = front.stream("The capital", gate, " of", front.finished())
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    server = HttpServer(GatewayApp(front.dispatch, AllowAll(), GatewayConfig()), "127.0.0.1", 0, graceful_s=1.0)
    await server.start()
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    with caplog.at_level(logging.WARNING):
        async with (
            httpx.AsyncClient(trust_env=False, timeout=20, verify=False) as client,
            client.stream("POST", url, json=body) as response,
        ):
            lines = response.aiter_lines()
            seen = [await anext(lines)]
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0)
            if grace == "enough":
                gate.set()
            seen += [line async for line in lines if line]
        await stopping
    assert await asyncio.to_thread(tokens.closed.wait, 20) and tokens.num_closes == 1
    assert "assistant" in seen[0]
    if grace == "enough":
        assert seen[-1] == "data: [DONE]"
        assert caplog.messages == []
    else:
        assert "shutting down" in seen[-1]
        assert all("Exception" not in message for message in caplog.messages)


async def test_a_startup_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(sockets: object) -> None:
        raise LookupError("planted")

    server = HttpServer(None, "127.0.0.1", 0)
    monkeypatch.setattr(server._server, "startup", broken)
    with pytest.raises(LookupError, match="planted"):
        await server.start()
    server._socket.close()
