"""Fuzz targets: what reads server-sent events, and what the gateway writes as such."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from loadtest.client.client import Answer, Refused, SseParser
from tandem.cli.chat import deltas
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.http.exchange import EventStream
from tests.hostile.surface import Surface

_CHAT = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "Paris"}}]}\n\n'
    b': heartbeat\n\ndata: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
)
_TEXT = (
    b'data: {"choices": [{"text": "Paris", "finish_reason": null, "token_ids": [5, 6]}], "usage": null}\r\n\r\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)


def _read(data: bytes) -> None:
    """Read bytes as the load client and as `tandem chat`. The load client finds the same events however the bytes are
    cut."""
    events = list(SseParser().feed(data))
    parser, size = SseParser(), max(3, len(data) // 1000)
    assert [event for start in range(0, len(data), size) for event in parser.feed(data[start : start + size])] == events
    with suppress(TandemError):
        list(deltas(data.decode("utf-8", "replace").splitlines()))
    answer = Answer()
    for event in events:
        answer.take(event, 1.0)
    answer.problem(2)


class _Wire:
    """Stand in for an exchange whose client receives `sent`."""

    def __init__(self) -> None:
        self.started = False
        self.sent = b""
        self.late_error: Any = None

    async def begin(self, headers: dict[str, str]) -> None:
        self.started = True

    async def write(self, body: bytes, *, more: bool) -> None:
        self.sent += body


def _write(data: bytes) -> None:
    """Write texts as events, and read the same texts back; the first byte of each text says how it is sent."""
    wire = _Wire()
    texts = [part.decode("utf-8", "replace") for part in data.split(b"\0")]

    async def answer() -> None:
        stream = EventStream(wire)  # type: ignore[arg-type]
        await stream.open({})
        for text in texts[:-1]:
            if text.startswith("h"):
                await stream.heartbeat({})
            await stream.send(msgspec.json.encode(text), more_follow=text.startswith("m"))
        if texts[-1].startswith("e"):
            wire.sent += wire.late_error(TandemError(ErrorKind.WORKER_LOST, texts[-1]))
        else:
            await stream.close(msgspec.json.encode(texts[-1]))

    _finish(answer())
    events = list(SseParser().feed(wire.sent))
    if texts[-1].startswith("e"):
        assert msgspec.json.decode(events.pop())["error"]["message"] == texts[-1]
    else:
        assert events.pop() == b"[DONE]"
        assert msgspec.json.decode(events.pop()) == texts[-1]
    assert list(map(msgspec.json.decode, events)) == texts[:-1]


def _finish(work: Any) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


SURFACES = {
    "sse-readers": Surface(
        read=_read,
        seeds=(_CHAT, _TEXT),
        errors=(Refused, msgspec.MsgspecError, UnicodeDecodeError),
        found=(
            b'data: {"choices": []}\r\r\n\r\n',  # a line end was read otherwise where the bytes were cut
            b'data: {"choices": [{"text": "a"}]}\n\n',  # `tandem chat` ended with a traceback
            b"data: [1\n\n",
            b"data: " + b"[" * 5_000 + b"\n\n",
        ),
    ),
    "sse-writer": Surface(
        read=_write, seeds=(b"hello\0more\0end", b"m\n\n\0m\r\ndata: x\0eno\nworker", b"\xc3\xa4\0h")
    ),
}
