"""Measure what the gateway's HTTP front end costs with nothing behind it, compared with servers that do less.

    python -m loadtest frontend [--quick] [--core N] [--fronts tandem,link,bare,starlette,fastapi] [--json FILE]

Each front end is a process of its own on one core; the client has the others. A round measures every front end once.
*Added* is the difference to `bare`, an ASGI endpoint that answers at once on the gateway's own server. Processor time
is the kernel's accounting of the server process, so it is valid on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop

from loadtest.common.stats import percentile
from loadtest.gateway.frontend_report import FrontendFigures, FrontendReport, MemoryUse, RequestRate, text
from loadtest.gateway.instant_backend import BY_STEP, NEVER
from loadtest.gateway.raw_client import Connection, chat_request
from loadtest.gateway.server_process import BenchServer
from tandem.core.clock import SystemClock

CONNECTIONS = (1, 64)
STREAMS = (1, 32, 64, 256)
OFFERED_RATE = 300.0
"""Requests/s over all connections where latency is measured: a tenth of a core's capacity."""
NUM_CHURNS = 5
NUM_GAPS = 5
LONG_PROMPT = 1_000_000


class FrontendBench:
    """Run the rounds of the benchmark one after the other over all front ends."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._clock = SystemClock()
        self._num_requests = 200 if args.quick else 600
        self._num_tokens = 5_000 if args.quick else 25_000
        self._num_open = 200 if args.quick else 1000

    async def latencies(self, server: BenchServer, num_connections: int) -> list[float]:
        """Return the seconds of each request, sent at a steady rate over `num_connections` connections."""
        connections = await self._connect(server, num_connections)
        request, seconds = chat_request(BY_STEP, 1), list[float]()
        pause = num_connections / OFFERED_RATE if num_connections > 1 else 0.0

        async def use(place: int, connection: Connection) -> None:
            began = self._clock.now() + pause * place / num_connections
            for number in range(self._num_requests // num_connections):
                await asyncio.sleep(max(0.0, began + number * pause - self._clock.now()))
                sent = self._clock.now()
                await connection.send(request)
                seconds.append(self._clock.now() - sent)

        await asyncio.gather(*(use(*item) for item in enumerate(connections)))
        _close(connections)
        return seconds

    async def requests(self, server: BenchServer, num_connections: int) -> RequestRate:
        """Measure the highest request rate of the server's core: every connection sends its next request at once."""
        connections = await self._connect(server, num_connections)
        request = chat_request(BY_STEP, 1)
        each = self._num_requests * 2 // num_connections

        async def use(connection: Connection) -> None:
            for _ in range(each):
                await connection.send(request)

        rate = await self._rate(server, each * num_connections, [use(connection) for connection in connections])
        _close(connections)
        return rate

    async def streams(self, server: BenchServer, num_streams: int) -> RequestRate:
        """Measure how many tokens per second the server streams over `num_streams` streams at a time."""
        connections = await self._connect(server, num_streams)
        each = max(50, self._num_tokens // num_streams)
        request = chat_request(BY_STEP, each, stream=True)
        rate = await self._rate(server, each * num_streams, [c.send(request) for c in connections])
        _close(connections)
        return rate

    async def memory(self, server: BenchServer) -> MemoryUse:
        """Measure the memory of open streams that wait for more tokens, and of a server after many clients
        disconnected."""
        before = server.pss_bytes()
        connections = await self._idle(server)
        held = server.pss_bytes()
        _close(connections)
        after: list[int] = []
        for _ in range(NUM_CHURNS):
            _close(await self._idle(server))
            await asyncio.sleep(0.5)
            after.append(server.pss_bytes())
        facts = {"num_streams": self._num_open, "before": before, "held": held, "peak": server.peak_bytes()}
        return MemoryUse(**facts, after=after)

    async def _idle(self, server: BenchServer) -> list[Connection]:
        connections = await self._connect(server, self._num_open)
        for connection in connections:
            connection.begin(chat_request(NEVER, 1000, stream=True))
        while not all(connection.num_bytes for connection in connections):  # noqa: ASYNC110 - one look at many
            await asyncio.sleep(0.01)
        return connections

    async def longest_gap(self, server: BenchServer, num_chars: int) -> float:
        """Return the longest pause of any of 16 streams, in seconds, while a prompt of `num_chars` characters is
        tokenized.

        Zero means that no stream paused.
        """
        connections = await self._connect(server, 17)
        streams, prompt_connection = connections[1:], connections[0]
        for stream in streams:
            stream.begin(chat_request(BY_STEP, 10_000, stream=True))
        await asyncio.sleep(0.05)
        if num_chars:
            prompt = ("It was a bright cold day in April. " * (num_chars // 35 + 1))[:num_chars]
            await prompt_connection.send(chat_request(BY_STEP, 1, content=prompt))
        await asyncio.gather(*(stream.wait_end() for stream in streams))
        gaps = [b - a for s in streams for a, b in zip(s.stamps, s.stamps[1:], strict=False)]
        _close(connections)
        return max(gaps)

    async def _connect(self, server: BenchServer, count: int) -> list[Connection]:
        return [await Connection.open(server.url, self._clock) for _ in range(count)]

    async def _rate(self, server: BenchServer, count: int, work: Sequence[object]) -> RequestRate:
        began, used = self._clock.now(), server.cpu_s()
        await asyncio.gather(*work)  # type: ignore[call-overload]
        return RequestRate(count=count, wall_s=self._clock.now() - began, cpu_s=server.cpu_s() - used)


def _close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.close()


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    if args.core is None and len(cores) > 1:
        args.core = cores[-1]
    if args.core is not None and len(cores) > 1:
        os.sched_setaffinity(0, set(cores) - {args.core})
    report = uvloop.run(_measure(args))
    sys.stdout.write(text(report))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest frontend", description="Measure what the gateway's door costs.")
    parser.add_argument(
        "--fronts", type=lambda text: tuple(text.split(",")), default=("tandem", "link", "bare", "fastapi")
    )
    parser.add_argument("--core", type=int, help="of the server (default: the last one; the client has the others)")
    parser.add_argument("--rounds", type=int, default=3, help="over all fronts (default: %(default)s)")
    parser.add_argument("--streams", type=_counts, default=STREAMS, metavar="N,N,...")
    parser.add_argument("--quick", action="store_true", help="one round of a few requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def _counts(given: str) -> tuple[int, ...]:
    return tuple(int(part) for part in given.split(","))


async def _measure(args: argparse.Namespace) -> FrontendReport:
    bench = FrontendBench(args)
    figures = {front: FrontendFigures() for front in args.fronts}
    async with AsyncExitStack() as stack:
        servers = {front: await BenchServer.start(front, args.core, stack) for front in args.fronts}
        for number in range(1 if args.quick else args.rounds):
            for front, server in servers.items():
                await _round(bench, figures[front], server, args.streams, is_first=number == 0)
        if "tandem" in servers:
            gaps = figures["tandem"].longest_gap_s
            for what, num_chars in (("none", 0), ("of 1 MB", LONG_PROMPT)):
                # The least value, because a client that stalls itself sees a gap too.
                gaps[what] = min([await bench.longest_gap(servers["tandem"], num_chars) for _ in range(NUM_GAPS)])
    for front in ("tandem", "fastapi"):
        if front in figures:
            async with AsyncExitStack() as stack:  # a fresh process, whose memory nothing has grown
                figures[front].memory = await bench.memory(await BenchServer.start(front, args.core, stack))
    return FrontendReport(core=args.core, fronts=figures)


async def _round(
    bench: FrontendBench, figures: FrontendFigures, server: BenchServer, streams: Sequence[int], *, is_first: bool
) -> None:
    if is_first:  # warms up
        await bench.requests(server, 8)
    for count in CONNECTIONS:
        seconds = await bench.latencies(server, count)
        figures.p50_s.setdefault(count, []).append(statistics.median(seconds))
        figures.p99_s.setdefault(count, []).append(percentile(seconds, 0.99))
    figures.requests.append(await bench.requests(server, 64))
    for count in streams:
        figures.streams.setdefault(count, []).append(await bench.streams(server, count))
