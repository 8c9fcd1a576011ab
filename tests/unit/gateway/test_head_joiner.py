"""Test that a response's head is written with the first part of its body, with uvicorn's own code above it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tandem.gateway.http.head_joiner import HeadJoiner
from tandem.gateway.http.server import HttpServer
from tests.unit.gateway.scripted_worker import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH_3 = (b"content-length", b"3")


class Transport(asyncio.Transport):
    """Record each write, and `(closed)`. An empty part of `writelines` is an error, as in asyncio of Python 3.12."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> None:
        self.writes.append(data)

    def writelines(self, parts: Iterable[Any]) -> None:
        given = list(parts)
        assert all(given)
        self.write(b"".join(given))

    def close(self) -> None:
        self.write(b"(closed)")

    def is_closing(self) -> bool:
        return b"(closed)" in self.writes


def joined(transport: Transport, method: str = "GET", *, expects_continue: bool = False) -> RequestResponseCycle:
    """Return uvicorn's cycle of one request over `transport`, with a joiner."""
    cycle = RequestResponseCycle(
        scope={"method": method, "http_version": "1.1"},  # type: ignore[typeddict-item]
        transport=transport,
        flow=FlowControl(transport),
        logger=logging.getLogger(__name__),
        access_logger=logging.getLogger(__name__),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=expects_continue,
        keep_alive=True,
        on_response=lambda: None,
    )
    cycle.transport = HeadJoiner(cycle)  # type: ignore[assignment]
    return cycle


async def begin(cycle: RequestResponseCycle, status: int, *headers: tuple[bytes, bytes]) -> None:
    await cycle.send({"type": "http.response.start", "status": status, "headers": headers})


async def body(cycle: RequestResponseCycle, part: bytes, *, more: bool = False) -> None:
    await cycle.send({"type": "http.response.body", "body": part, "more_body": more})


async def test_head_and_body_are_one_write() -> None:
    transport = Transport()
    cycle = joined(transport)
    await begin(cycle, 200, LENGTH_3)
    assert transport.writes == []
    await body(cycle, b"abc")
    assert transport.writes == [OK + b"content-length: 3\r\n\r\nabc"]
    assert cycle.response_complete


async def test_later_parts_are_written_at_once() -> None:
    transport = Transport()
    cycle = joined(transport)
    await begin(cycle, 200)
    await body(cycle, b"a", more=True)
    await body(cycle, b"b", more=True)
    await body(cycle, b"")
    assert transport.writes == [OK + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"]
    assert cycle.transport is transport


@pytest.mark.parametrize(("status", "headers"), [(304, ()), (200, ((b"content-length", b"0"),)), (200, ())])
async def test_an_empty_part_sends_the_head(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    transport = Transport()
    cycle = joined(transport)
    await begin(cycle, status, *headers)
    await body(cycle, b"", more=status == 200 and not headers)
    assert len(transport.writes) == 1 and transport.writes[0].endswith(b"\r\n\r\n")


async def test_100_continue_is_written_before_the_head() -> None:
    transport = Transport()
    cycle = joined(transport, "POST", expects_continue=True)
    cycle.message_event.set()
    await cycle.receive()
    assert transport.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    await begin(cycle, 200, LENGTH_3)
    await body(cycle, b"abc")
    assert transport.writes[1:] == [OK + b"content-length: 3\r\n\r\nabc"]


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_response_that_breaks_off_leaves_nothing_unwritten(*, has_begun: bool) -> None:
    transport = Transport()
    cycle = joined(transport)
    if has_begun:
        await begin(cycle, 200, LENGTH_3)
    assert not cycle.transport.is_closing()
    cycle.transport.close()
    head = [OK + b"content-length: 3\r\n\r\n"] if has_begun else []
    assert transport.writes == [*head, b"(closed)"]
    assert cycle.transport.is_closing()


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_the_server_joins_every_head_that_has_a_body(method: bytes) -> None:
    may_go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [LENGTH_3]})
        await may_go_on.wait()
        await send({"type": "http.response.body", "body": b"abc"})

    server = HttpServer(app, "127.0.0.1", 0, graceful_s=1.0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(method + b" / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        begun = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        await asyncio.wait({begun}, timeout=0.1 if method == b"GET" else PATIENCE_S)
        assert begun.done() == (method == b"HEAD")
        may_go_on.set()
        assert (await begun).startswith(OK)
        if method == b"GET":
            assert await reader.readexactly(3) == b"abc"
    finally:
        writer.close()
        await server.stop()
