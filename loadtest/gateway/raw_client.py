"""Provide a cheap HTTP client for the front end's benchmark: keep-alive connections and streams."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any, cast
from urllib.parse import urlsplit

from tandem.core.clock import Clock

_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class UnexpectedAnswer(Exception):
    """Raised on an HTTP answer other than the requested one."""


def chat_request(model: str, num_tokens: int, *, stream: bool = False, content: str = "Hello") -> bytes:
    """Return a whole HTTP request for a chat completion, as bytes."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": num_tokens,
        "stream": stream,
        "messages": [{"role": "user", "content": content}],
    }
    text = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer none\r\ncontent-length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


class Connection(asyncio.Protocol):
    """One HTTP connection; `stamps` are the times at which data of the last answer arrived."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._in_head, self._is_stream = True, False
        self._head = self._tail = b""
        self._num_missing = 0
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_bytes = 0
        self.stamps: list[float] = []

    @classmethod
    async def open(cls, url: str, clock: Clock) -> Connection:
        parts = urlsplit(url)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if parts.scheme == "https" else None
        if context is not None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the server makes its certificate
        host, _, port = parts.netloc.partition(":")
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: cls(clock), host, int(port), ssl=context)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(UnexpectedAnswer("the connection was closed"))
            self._ended.exception()

    async def send(self, request: bytes) -> None:
        """Send one request and wait for its whole answer. Raises UnexpectedAnswer."""
        self.begin(request)
        await self._ended

    def begin(self, request: bytes) -> None:
        assert self._transport is not None
        self._in_head, self._head, self._tail = True, b"", b""
        self.stamps, self.num_bytes = [], 0
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)

    async def wait_end(self) -> None:
        await self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.stamps.append(self._clock.now())
        self.num_bytes += len(data)
        if self._in_head:
            self._head += data
            head, sign, data = self._head.partition(_END)
            if not sign:
                return
            self._take_head(head)
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        self._num_missing -= len(data)
        ended = self._tail == _LAST_CHUNK if self._is_stream else self._num_missing == 0
        if ended and not self._ended.done():
            self._ended.set_result(None)

    def _take_head(self, head: bytes) -> None:
        self._in_head = False
        if not head.startswith(b"HTTP/1.1 200") and not self._ended.done():
            self._ended.set_exception(UnexpectedAnswer(head.decode("latin-1")))
        length = head.lower().partition(b"content-length: ")[2]
        self._is_stream = not length
        self._num_missing = int(length.split(b"\r\n")[0]) if length else 0
