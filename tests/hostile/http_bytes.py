"""Fuzz target: the bytes of one HTTP connection, through the gateway's protocol and its application."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import httptools
import uvicorn
from uvicorn.server import ServerState

from tandem.core.config import GatewayConfig
from tandem.gateway.app import GatewayApp
from tandem.gateway.context.interfaces import AllowAll
from tandem.gateway.http.monitoring_routes import PROBES
from tandem.gateway.http.protocol_limits import HttpLimits, LimitedHttpProtocol
from tests.hostile.bodies import served_model
from tests.hostile.surface import Surface
from tests.unit.gateway.conftest import ScriptedDispatch, ScriptedStream
from tests.unit.gateway.instant import instant_events

_LIMITS = HttpLimits(probes=PROBES)
_SERVER_ERROR = re.compile(rb"(?:^|\r\n|\})HTTP/1\.1 5")
_MAX_TURNS = 200
"""Turns of the event loop in which a request that needs nothing else is answered."""


class _Transport(asyncio.Transport):
    """Keep what is written. `is_paused`: the protocol wants no further bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_paused = False
        self.is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.1", 5000)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass


class _Replies:
    """Read what a connection has written, and raise httptools' error where it is not HTTP. `is_complete`: the last
    response is whole."""

    def __init__(self) -> None:
        self.is_complete = True
        self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.is_complete = False

    def on_message_complete(self) -> None:
        self.is_complete = True

    def read(self, data: bytes) -> None:
        self._parser.feed_data(data)


class _Defects(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


class _Door:
    """Own an application and an event loop on which connections are made one after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self._defects.append(str(context)))
        self._defects: list[str] = []
        self._logged = _Defects()
        logging.getLogger().addHandler(self._logged)
        dispatch = ScriptedDispatch([served_model()])
        dispatch.script = lambda request: ScriptedStream(instant_events(request, [60, 61]))
        app = GatewayApp(dispatch, AllowAll(), GatewayConfig())
        self._config = uvicorn.Config(app, lifespan="off", access_log=False, log_config=None, server_header=False)
        self._config.load()
        self._state = ServerState()

    def serve(self, data: bytes) -> None:
        """Let a client send bytes and leave; the first byte is the size of the pieces, or 0 for all at once. Raises
        AssertionError where the gateway answers with an error of its own, writes what is no HTTP, or holds something
        afterwards."""
        self._loop.run_until_complete(self._serve(data[1:], data[0] if any(data[:1]) else max(1, len(data))))
        assert not self._defects and not self._logged.seen, (self._defects, self._logged.seen)

    async def _serve(self, data: bytes, size: int) -> None:
        transport = _Transport()
        protocol = LimitedHttpProtocol(_LIMITS, config=self._config, server_state=self._state, app_state={})
        protocol.connection_made(transport)
        for start in range(0, len(data), size):
            await self._settle(lambda: not transport.is_paused)
            if transport.is_closed or transport.is_paused:
                break
            protocol.data_received(data[start : start + size])
        await self._settle(lambda: not self._state.tasks)
        protocol.connection_lost(None)
        await self._settle(lambda: not self._state.tasks)
        assert not self._state.tasks and not self._state.connections
        assert not _SERVER_ERROR.search(transport.written), bytes(transport.written[-500:])
        if b"HEAD" not in data:  # a parser takes what follows such an answer for its body
            replies = _Replies()
            replies.read(bytes(transport.written))
            assert replies.is_complete or transport.is_closed

    async def _settle(self, is_done: Any) -> None:
        for _ in range(_MAX_TURNS):
            if is_done():
                return
            await asyncio.sleep(0)


_door: list[_Door] = []


def _read(data: bytes) -> None:
    if not _door:
        _door.append(_Door())
    _door[0].serve(data)


def _post(path: bytes, body: bytes, headers: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\n%bcontent-length: %d\r\n\r\n"
    return head % (path, headers, len(body)) + body


_BODY = b'{"model": "tiny", "prompt": "hi"}'
_CHUNKS = b"transfer-encoding: chunked\r\n\r\n5;x=y\r\n[1,2,\r\n2\r\n3]\r\n0\r\ntrailer: z\r\n\r\n"
SURFACES = {
    "http": Surface(
        read=_read,
        seeds=(
            b"\0GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
            b"\0" + _post(b"/v1/completions", _BODY, b"authorization: Bearer x\r\nx-request-timeout-ms: 50\r\n"),
            b"\x07" + _post(b"/v1/chat/completions?a=%20b", b'{"model": "a", "messages": []}', b"x-request-id: 5\r\n"),
            b"\0POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\n" + _CHUNKS,
            b"\x40GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /live HTTP/1.0\r\nconnection: close\r\n\r\n",
            b"\0" + _post(b"/detokenize", b'{"tokens": [1]}', b"connection: Upgrade\r\nupgrade: h2c\r\n"),
            b"\0" + _post(b"/v1/embeddings", b"", b"expect: 100-continue\r\ncontent-encoding: gzip\r\n"),
        ),
    )
}
