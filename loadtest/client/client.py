"""Send one call to an OpenAI-compatible endpoint and record the arrival time of every token.

Nothing is retried.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec

from loadtest.client.calls import TimedCall
from loadtest.client.endpoint import Endpoint
from loadtest.client.records import Record
from tandem.core.clock import Clock

TIMEOUT_S = 600.0
"""Limit of one whole answer, in seconds."""
MAX_EVENT_BYTES = 1 << 24
_LINE_END = re.compile(rb"\r?\n")
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class Refused(Exception):
    """Raised when the endpoint answers with an error: before the stream (`status` of HTTP) or within it (status 0)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.kind = f"http {status}" if status else "error event"


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class StreamChunk(msgspec.Struct):
    """One event of a stream of completions; fields that are not listed are ignored. `token_ids` is an extension of
    vLLM."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class SseParser:
    """Split a byte stream into the data of its server-sent events.

    Implements the `data` lines of WHATWG HTML, section "server-sent events". Chunks of bytes may end anywhere.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes; yield the data of each event that is complete. Raises ValueError when an event exceeds
        MAX_EVENT_BYTES."""
        parts = _EVENT_END.split(self._rest + data)
        self._rest = parts.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for part in parts:
            lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(part) if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


class Answer:
    """State of one answer while it is received: its tokens and their arrival times.

    Where the server reports no token ids, the number of tokens in a chunk is known only from the total at the end, so
    each chunk counts as one arrival.
    """

    def __init__(self) -> None:
        self.stamps_s: list[float] = []
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.finish_reason = ""
        self.num_reported: int | None = None
        self.is_complete = False

    def take(self, data: bytes, now: float) -> None:
        """Add one event that arrived at `now`.

        Raises Refused on an error event and msgspec.DecodeError on data that is not a chunk.
        """
        if data == b"[DONE]":
            self.is_complete = True
            return
        chunk = _CHUNK.decode(data)
        if chunk.error is not None:
            raise Refused(str(chunk.error))
        if chunk.usage is not None:
            self.num_reported = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.token_ids:
                self.tokens += choice.token_ids
                self.stamps_s += [now] * len(choice.token_ids)
            elif choice.text and not self.tokens:
                self.stamps_s.append(now)
            self.texts.append(choice.text)
            self.finish_reason = choice.finish_reason or self.finish_reason

    @property
    def num_tokens(self) -> int:
        if self.num_reported is not None:
            return self.num_reported
        return len(self.tokens) or len(self.stamps_s)

    def problem(self, num_requested: int, is_exact: bool = True) -> tuple[str, str]:
        """Return why this answer is incomplete, as a kind and a message; both are empty when it is complete.

        With `is_exact` an answer may not end before `num_requested` tokens.
        """
        if not self.is_complete:
            return "cut off", "the stream ended early"
        if self.num_tokens != num_requested and (is_exact or self.num_tokens > num_requested):
            return "wrong length", f"{self.num_tokens} of {num_requested} tokens, {self.finish_reason!r}"
        if not self.stamps_s:
            return "empty", "no token was seen"
        if self.tokens and len(self.tokens) != self.num_tokens:
            return "wrong length", "token ids are missing"
        return "", ""


_CHUNK = msgspec.json.Decoder(StreamChunk)


_FAILURES = (aiohttp.ClientError, OSError, Refused, TimeoutError, msgspec.MsgspecError, ValueError)
"""Exceptions that become a failed record. ValueError is raised by an event without an end."""


class Client:
    """HTTP client of one endpoint; `clock` can be replaced in tests."""

    def __init__(
        self, endpoint: Endpoint, session: aiohttp.ClientSession, clock: Clock, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._url = endpoint.url + endpoint.path
        self._session = session
        self._clock = clock
        self._timeout_s = timeout_s

    async def send(self, call: TimedCall, began: float, due_s: float | None) -> Record:
        """Send the call now and return the record of the answer; a failure is returned as a record too.

        Times count from `began`. Without `due_s` the call counts as due now.
        """
        answer = Answer()
        sent = self._clock.now() - began
        try:
            async with asyncio.timeout(self._timeout_s):
                async for data, now in self._events(call):
                    answer.take(data, now - began)
            kind, error = answer.problem(call.num_requested_tokens, call.is_exact)
        except _FAILURES as failure:
            kind, error = _kind(failure), f"{type(failure).__name__}: {failure}"
        return Record(
            name=call.name,
            group=call.group,
            tenant=call.tenant,
            num_prompt_tokens=call.num_prompt_tokens,
            num_requested_tokens=call.num_requested_tokens,
            due_s=sent if due_s is None else due_s,
            sent_s=sent,
            ended_s=self._clock.now() - began,
            stamps_s=tuple(answer.stamps_s),
            tokens=tuple(answer.tokens) or None,
            text="".join(answer.texts),
            num_output_tokens=answer.num_tokens,
            finish_reason=answer.finish_reason,
            error=error,
            error_kind=kind,
        )

    async def _events(self, call: TimedCall) -> AsyncIterator[tuple[bytes, float]]:
        """Yield the data of each event with the time at which its last byte arrived."""
        parser = SseParser()
        async with self._session.post(self._url, data=call.body, headers=call.headers) as response:
            call.body = b""  # long prompts take most of the memory of an open request
            if response.status != 200:
                raise Refused(f"{response.status}: {(await response.text(errors='replace'))[:500]}", response.status)
            async for data in response.content.iter_any():
                now = self._clock.now()
                for event in parser.feed(data):
                    yield event, now


def _kind(failure: Exception) -> str:
    match failure:
        case Refused():
            return failure.kind
        case TimeoutError():
            return "timeout"
        case msgspec.MsgspecError() | ValueError():
            return "garbage"
        case aiohttp.ClientConnectorError():
            return "no connection"
        case aiohttp.ClientPayloadError():
            return "cut off"
        case _:
            return "connection lost"
