"""Sends a workload to an OpenAI-compatible endpoint and stamps every token; never decides what is sent.

An open loop: a request leaves when its schedule says so, whatever became of earlier ones, and its TTFT counts from the
time it was due. Nothing is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import msgspec

from loadtest.records import Record
from loadtest.workloads import Ask, Workload
from tandem.core.clock import Clock

TIMEOUT_S = 600.0
"""For one whole answer."""
Sleep = Callable[[float], Awaitable[None]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to ask. `path` is that of completions; `extra` are fields that only this kind of server knows."""

    url: str
    model: str
    path: str = "/v1/completions"
    extra: dict[str, Any] = {}


class Refused(Exception):
    """The endpoint answered with an error, before or within the stream."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Chunk(msgspec.Struct):
    """An event of a stream of completions; of other fields nothing is read. `token_ids` is vLLM's addition."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class SseParser:
    """Cuts a byte stream into the data of its events (WHATWG HTML, section "server-sent events", of which only `data`
    lines are of interest). Bytes may come cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is complete."""
        parts = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        self._rest = parts.pop()
        for part in parts:
            lines = [line[5:].removeprefix(b" ") for line in part.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


class Answer:
    """One answer as it comes. Where the server tells no ids, how many tokens a chunk held is known only from the whole
    count at the end, so each chunk is one arrival then."""

    def __init__(self) -> None:
        self.stamps_s: list[float] = []
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.finish_reason = ""
        self.num_told: int | None = None
        self.is_complete = False

    def take(self, data: bytes, now: float) -> None:
        """Raises Refused on an error event, msgspec.DecodeError on what is no chunk."""
        if data == b"[DONE]":
            self.is_complete = True
            return
        chunk = _CHUNK.decode(data)
        if chunk.error is not None:
            raise Refused(str(chunk.error))
        if chunk.usage is not None:
            self.num_told = chunk.usage.completion_tokens
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
        if self.num_told is not None:
            return self.num_told
        return len(self.tokens) or len(self.stamps_s)

    def problem(self, num_asked: int) -> str:
        """Why this answer is not whole; empty when it is."""
        if not self.is_complete:
            return "the stream ended early"
        if self.num_tokens != num_asked:
            return f"{self.num_tokens} of {num_asked} tokens, {self.finish_reason!r}"
        if not self.stamps_s:
            return "no token was seen"
        return "" if not self.tokens or len(self.tokens) == num_asked else "token ids are missing"


_CHUNK = msgspec.json.Decoder(Chunk)


class Client:
    """Runs workloads against one endpoint. `clock` and `sleep` come from outside, so that a schedule can be tested."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession, clock: Clock, sleep: Sleep) -> None:
        self._endpoint = endpoint
        self._session = session
        self._clock = clock
        self._sleep = sleep

    async def run(self, workload: Workload) -> tuple[Record, ...]:
        """All records, in the order of the asks. Failures are in the records."""
        began = self._clock.now()
        if workload.is_sequential:
            return tuple([await self._record(ask, began, due=None) for ask in workload.asks])
        tasks: list[asyncio.Task[Record]] = []
        async with asyncio.TaskGroup() as group:
            for ask in sorted(workload.asks, key=lambda ask: ask.due_s):
                wait = began + ask.due_s - self._clock.now()
                if wait > 0:
                    await self._sleep(wait)
                tasks.append(group.create_task(self._record(ask, began, due=ask.due_s)))
        by_name = {task.result().name: task.result() for task in tasks}
        return tuple(by_name[ask.name] for ask in workload.asks)

    async def _record(self, ask: Ask, began: float, due: float | None) -> Record:
        answer = Answer()
        sent = self._clock.now() - began
        try:
            async with asyncio.timeout(TIMEOUT_S):
                async for data, now in self._events(ask):
                    answer.take(data, now - began)
            error = answer.problem(ask.max_tokens)
        except (aiohttp.ClientError, OSError, Refused, TimeoutError, msgspec.MsgspecError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        return Record(
            name=ask.name,
            group=ask.group,
            num_prompt_tokens=len(ask.prompt),
            num_asked_tokens=ask.max_tokens,
            due_s=sent if due is None else due,
            sent_s=sent,
            stamps_s=tuple(answer.stamps_s),
            tokens=tuple(answer.tokens) or None,
            text="".join(answer.texts),
            num_output_tokens=answer.num_tokens,
            finish_reason=answer.finish_reason,
            error=error,
        )

    async def _events(self, ask: Ask) -> AsyncIterator[tuple[bytes, float]]:
        """The data of each event with the time at which its last byte was here."""
        body = {
            "model": self._endpoint.model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._endpoint.extra,
        }
        parser, headers = SseParser(), {"content-type": "application/json"}
        url = self._endpoint.url + self._endpoint.path
        async with self._session.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status != 200:
                raise Refused(f"{response.status}: {(await response.text())[:500]}")
            async for data in response.content.iter_any():
                now = self._clock.now()
                for event in parser.feed(data):
                    yield event, now


async def ask_endpoint(endpoint: Endpoint, workload: Workload, clock: Clock) -> tuple[Record, ...]:
    """Run one workload, with a connection for each request: some servers close theirs after an answer, and a request
    that meets the closing would fail."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await Client(endpoint, session, clock, asyncio.sleep).run(workload)
