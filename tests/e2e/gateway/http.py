"""Send requests over sockets, so that a test decides what is read and when the client disconnects."""

from __future__ import annotations

import json
import random
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.gateway.processes import PATIENCE_S

LONG_PROMPT = 8000
LONG_ANSWER = 8000
_FIRST_ID, _LAST_ID = 3, 250


def prompt(length: int, salt: int) -> list[int]:
    """Return token ids that share no prefix with those of another salt."""
    ids = random.Random(salt)
    return [ids.randint(_FIRST_ID, _LAST_ID) for _ in range(length)]


def completion(length: int, salt: int, max_tokens: int, **options: Any) -> dict[str, Any]:
    """Return the body of a completion over a prompt of `length` tokens."""
    return {"model": "tiny", "prompt": prompt(length, salt), "max_tokens": max_tokens, "temperature": 0} | options


class Post:
    """Own a request that was sent. Leaving the context disconnects, whatever has been read by then."""

    def __init__(
        self,
        url: str,
        body: dict[str, Any],
        *,
        key: str = "",
        headers: Mapping[str, str] | None = None,
        receive_buffer: int | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        where = urlsplit(url)
        text = json.dumps(body).encode()
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect((where.hostname, where.port))
        if context is not None:
            self._socket = context.wrap_socket(self._socket, server_hostname=where.hostname)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\nconnection: close\r\n"
        head += f"x-api-key: {key}\r\n" if key else ""
        head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        self._socket.sendall(head.encode() + text)
        self._read = b""

    def __enter__(self) -> Post:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def wait_events(self, count: int) -> None:
        """Read until `count` server-sent events have arrived."""
        while self._read.count(b"data: ") < count:
            assert self._receive(), f"the response ended: {self._read[-2000:]!r}"

    def finish(self) -> Answer:
        """Read to the end."""
        while self._receive():
            pass
        return Answer(self._read)

    def rest(self) -> bytes:
        """Return all bytes until the connection ends, with or without an error."""
        with suppress(ConnectionError):
            while self._receive():
                pass
        return self._read

    def _receive(self) -> bytes:
        more = self._socket.recv(1 << 16)
        self._read += more
        return more


def send(url: str, body: dict[str, Any], **options: Any) -> Answer:
    """Send a request, and read its answer to the end; `options` are those of `Post`."""
    with Post(url, body, **options) as post:
        return post.finish()


def begin_streams(stack: ExitStack, url: str, bodies: Iterable[dict[str, Any]], num_events: int) -> list[Post]:
    """Send requests that the stack closes, and wait until each has `num_events` events."""
    posts = [stack.enter_context(Post(url, body | {"stream": True})) for body in bodies]
    for post in posts:
        post.wait_events(num_events)
    return posts


class Answer:
    """Hold a complete response."""

    def __init__(self, read: bytes) -> None:
        head, _, self._body = read.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        assert first, "the connection was closed without an answer"
        self.status = int(first.split()[1])
        self.headers = dict(line.lower().split(": ", 1) for line in rest)
        if self.headers.get("transfer-encoding") == "chunked":
            self._body = b"".join(_chunks(self._body))

    @property
    def path(self) -> str:
        return self.headers.get("x-tandem-path", "")

    def json(self) -> Any:
        return json.loads(self._body)

    def events(self) -> list[Any]:
        """Return the streamed events; `[DONE]` as None."""
        found = [part[6:] for part in self._body.decode().split("\n\n") if part.startswith("data: ")]
        return [None if text == "[DONE]" else json.loads(text) for text in found]

    def error(self) -> dict[str, Any] | None:
        """Return the typed error, sent with its own status or as the last event of a stream."""
        body: Any = self.json() if self.status != 200 or "json" in self.headers["content-type"] else None
        if body is None:
            body = next((event for event in self.events() if event and "error" in event), {})
        error: dict[str, Any] | None = body.get("error")
        return error

    def about(self) -> dict[str, Any]:
        """Return the `tandem` field at the end of the answer."""
        bodies = [self.json()] if "json" in self.headers["content-type"] else self.events()
        tandem_field: dict[str, Any] = next(body["tandem"] for body in reversed(bodies) if body and "tandem" in body)
        return tandem_field

    def text(self) -> str:
        """Return the whole text, streamed or not."""
        if "json" in self.headers["content-type"]:
            return str(self.json()["choices"][0]["text"])
        choices = [event["choices"] for event in self.events() if event and event.get("choices")]
        return "".join(choice[0]["text"] for choice in choices)


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        yield body[:length]
        body = body[length + 2 :]
