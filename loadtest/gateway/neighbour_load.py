"""Send one tenant's ordinary requests to a gateway and time them; sample the memory of its processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from loadtest.client.client import SseParser
from loadtest.common.stats import percentile

LONG_CHARS = 30_000
PAUSE_S = 0.05
"""Between two requests of one kind, so that the victim is no flood itself."""
HEALTH_S = 0.1
SAMPLE_S = 0.25
STREAM_TOKENS = 400
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
_WORDS = "The quick brown fox jumps over the lazy dog while it rains in the mountains of the north. "


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one period in seconds, by kind of request; `gap_s` and `health_s` are the longest ones."""

    p50_s: dict[str, float]
    p99_s: dict[str, float]
    num_requests: dict[str, int]
    gap_s: float
    health_s: float
    errors: list[str]


class Victim:
    """Own the ordinary client of one gateway, which sends `plain`, `30 kB` and `guided` requests, each kind one at a
    time, and reads one stream after the other."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._model = ""
        self._numbers = 0
        self._reset()

    async def __aenter__(self) -> Victim:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(None))
        async with self._session.get(f"{self._url}/v1/models") as response:
            self._model = (await response.json())["data"][0]["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def _reset(self) -> None:
        self._times_s: dict[str, list[float]] = {"plain": [], "30 kB": [], "guided": []}
        self._gaps_s: list[float] = []
        self._health_s: list[float] = []
        self._errors: list[str] = []

    async def warm_up(self) -> None:
        """Send one request of each kind, so that the first measured one finds everything loaded."""
        for kind in self._times_s:
            await self._send(kind)
        self._reset()

    async def run(self, seconds: float) -> Period:
        """Send requests for `seconds`, wait for the last ones, and return the times."""
        self._reset()
        stop = asyncio.get_running_loop().time() + seconds
        loops = [self._repeat(kind, stop) for kind in self._times_s]
        await asyncio.gather(*loops, self._stream(stop), self._health(stop))
        times_s = {kind: found for kind, found in self._times_s.items() if found}
        return Period(
            p50_s={kind: percentile(found, 0.5) for kind, found in times_s.items()},
            p99_s={kind: percentile(found, 0.99) for kind, found in times_s.items()},
            num_requests={kind: len(found) for kind, found in times_s.items()},
            gap_s=max(self._gaps_s, default=0.0),
            health_s=max(self._health_s, default=0.0),
            errors=list(self._errors),
        )

    async def _repeat(self, kind: str, stop: float) -> None:
        while asyncio.get_running_loop().time() < stop:
            await self._send(kind)
            await asyncio.sleep(PAUSE_S)

    async def _send(self, kind: str) -> None:
        began = time.perf_counter()
        try:
            async with self._session.post(f"{self._url}/v1/chat/completions", data=self._body(kind)) as response:
                text = await response.text()
                if response.status != 200:
                    self._errors.append(f"{kind}: {response.status}: {text[:200]}")
                    return
        except (aiohttp.ClientError, OSError) as error:
            self._errors.append(f"{kind}: {error!r}")
            return
        self._times_s[kind].append(time.perf_counter() - began)

    def _body(self, kind: str) -> bytes:
        """Return a request that no cache has: its text begins with a number of its own."""
        self._numbers += 1
        text = f"Question {self._numbers}: what is 2 + 2?"
        fields: dict[str, Any] = {}
        if kind == "30 kB":
            text = f"{text} {_WORDS * (LONG_CHARS // len(_WORDS))}"
        elif kind == "guided":
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}
        return self._chat(text, max_tokens=8, **fields)

    def _chat(self, text: str, **fields: Any) -> bytes:
        messages = [{"role": "user", "content": text}]
        return json.dumps({"model": self._model, "messages": messages, "temperature": 0, **fields}).encode()

    async def _stream(self, stop: float) -> None:
        """Read streams, and record the times between two pieces that arrive."""
        while asyncio.get_running_loop().time() < stop:
            parser, last = SseParser(), 0.0
            body = self._chat("Count.", max_tokens=STREAM_TOKENS, ignore_eos=True, stream=True)
            try:
                async with self._session.post(f"{self._url}/v1/chat/completions", data=body) as response:
                    if response.status != 200:
                        self._errors.append(f"stream: {response.status}: {(await response.text())[:200]}")
                        continue
                    async for data in response.content.iter_any():
                        now = time.perf_counter()
                        if any(parser.feed(data)):
                            self._gaps_s += [now - last] if last else []
                            last = now
            except (aiohttp.ClientError, OSError) as error:
                self._errors.append(f"stream: {error!r}")
            await asyncio.sleep(PAUSE_S)

    async def _health(self, stop: float) -> None:
        while asyncio.get_running_loop().time() < stop:
            began = time.perf_counter()
            try:
                async with self._session.get(f"{self._url}/health") as response:
                    await response.read()
            except (aiohttp.ClientError, OSError) as error:
                self._errors.append(f"/health: {error!r}")
            self._health_s.append(time.perf_counter() - began)
            await asyncio.sleep(HEALTH_S)


class Memory:
    """Read the memory of a process and its children: their proportional set size, in which shared pages count once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.last_bytes = self.peak_bytes = self.bytes()

    def bytes(self) -> int:
        return sum(_pss_bytes(pid) for pid in _family(self._pid))

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.last_bytes = await asyncio.to_thread(self.bytes)
            self.peak_bytes = max(self.peak_bytes, self.last_bytes)
            await asyncio.sleep(SAMPLE_S)


@asynccontextmanager
async def sampled(pid: int) -> AsyncIterator[Memory]:
    """Yield the memory of a process, which is sampled inside the context."""
    memory = Memory(pid)
    watching = asyncio.create_task(memory.watch())
    try:
        yield memory
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            yield from _family(int(child))


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
