"""Measure the processor time of each streamed token in gateways with and without telemetry, in alternating turns.

In a turn each of `NUM_STREAMS` connections requests a few answers, one connection a little after the other. The worker
makes a step at a fixed interval, as an engine does, so a message carries the tokens of all running streams. A worker
that makes steps without waiting would send messages with the tokens of only a few streams; any extra cost of a request
would then change how many tokens a message carries, and the worker would be measured instead of the gateway.

The gateway with telemetry is scraped, and where a console is open polled, after the turns of a round. Of the scrape, a
turn bears the share that its seconds have in the interval between two scrapes; the console's poll and the sending of
spans concern all turns of the round and are divided equally. Adjacent turns of the two sides are compared, because a
noisy machine changes within seconds, and a core-speed probe runs beside them, because it may change between two turns
as well.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from loadtest.common.paired_comparison import Timed
from loadtest.gateway.instant_backend import BY_STEP
from loadtest.gateway.raw_client import Connection, chat_request
from loadtest.processes.telemetry_processes import TURNS, Child, CoreSpeed, ProcessPlacement, get, pushing, sink
from tandem.core.clock import SystemClock
from tandem.stores.embedded_redis import EmbeddedServer

NUM_TOKENS = 128
"""Tokens of an answer, which share the cost of one request."""
NUM_STREAMS = 32
STEP_S = 0.005
"""Seconds between two messages of a worker. The gateway is busy for half of it; several waiting tokens leave at once.
"""
IDLE_S = 0.5
SCRAPE_S = 10.0
"""Scrape interval of deploy/prometheus/prometheus.yml and the chart, in seconds."""
NUM_ANSWERS = 3
"""Answers of a stream in a turn, so that the work after an answer runs among the tokens of others."""
_STREAM_TURNS = TURNS[: len(TURNS) // 2]
"""As many answers in a round as a console that looks every few seconds has to be told of."""
_STAGGER_S = STEP_S * NUM_TOKENS / NUM_STREAMS
"""Seconds between the starts of two streams of a turn, so that answers begin and end all the time."""


class TelemetryUse(NamedTuple):
    """How much of a gateway's telemetry is in use. `traced`: share of the requests that is traced. `is_all`: every
    request is logged, a console polls, and metrics are pushed to a receiver of OTLP besides being scraped."""

    name: str
    traced: float
    is_all: bool


USES = (TelemetryUse("as installed", 0.01, False), TelemetryUse("all of it", 1.0, True))
"""The chart's values with a receiver of traces and a Prometheus, and everything that can be turned on."""


class StreamTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one side in one turn, and their cost.

    `cpu_s`: processor seconds of the gateway's process in the turn, minus those of an idle period of the same length.
    For the side with telemetry it includes this turn's share of a scrape, a console's poll and the sending of spans.
    """

    num_tokens: int
    cpu_s: float
    core_speed_s: float
    """Seconds that the constant reference work took on that core in that turn."""

    @property
    def token(self) -> Timed:
        """Return the processor seconds of one streamed token, with the core's speed in this turn."""
        return Timed(self.cpu_s / self.num_tokens, self.core_speed_s)


class Gateways:
    """Gateway processes of both sides, without and with telemetry, each with a fake worker.

    Both sides are one process that turns telemetry off and on, because the memory layout of two processes differs,
    which can make a difference of 5 %. If the side without is another commit, there are two processes on one core.
    """

    def __init__(self, place: ProcessPlacement, stack: ExitStack, step_s: float, use: TelemetryUse) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-telemetry-")))
        redis = stack.enter_context(EmbeddedServer.start())
        self.sink = sink(stack)
        self.log = directory / "gateway.log"
        # What one side leaves to be sent is not sent in the other's turn.
        pushed = pushing(self.sink.ready["endpoint"], use.traced) | {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
        if not use.is_all:
            pushed["OTEL_METRICS_EXPORTER"] = "none"

        def start(*arguments: str, **more: str) -> Child:
            is_off = arguments[0] == "off"
            stepping = [sys.executable, "-m", "loadtest.gateway.fake_worker", "--step-ms", str(1e3 * step_s)]
            worker = Child(stack, stepping, place.environment()).ready["worker"]
            shared = ("--worker", worker, "--redis", redis.url)
            command = place.command("telemetry_server", *arguments, *shared, is_off=is_off)
            return Child(stack, command, place.environment(is_off=is_off) | more)

        instrumented = start("on", "--log", str(self.log), *(["--log-all"] if use.is_all else []), **pushed)
        self.use = use
        self.sides = [instrumented if place.before is None else start("off"), instrumented]
        self.core_speed = CoreSpeed(place, stack)


class Looker:
    """Send the requests of a Prometheus server and of a console to a gateway."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen = "life=&since=0"

    def scrape(self) -> None:
        get(f"{self._url}/metrics")

    def poll(self) -> None:
        state = json.loads(get(f"{self._url}/console/state?{self._seen}"))
        self._seen = f"life={state['gateway']['life']}&since={state['number']}"


class Streams:
    """The connections to the gateways of both sides, over which rounds of streams are measured."""

    def __init__(self, sides: Sequence[Child], core_speed: CoreSpeed, *, is_polled: bool) -> None:
        self._sides = sides
        self._is_polled = is_polled
        self._core_speed = core_speed
        self._clock = SystemClock()
        self._request = chat_request(BY_STEP, NUM_TOKENS, stream=True)
        self._connections: list[list[Connection]] = []
        self._looker = Looker(sides[1].ready["url"])

    async def open(self) -> None:
        for side in self._sides:
            url = side.ready["url"]
            self._connections.append([await Connection.open(url, self._clock) for _ in range(NUM_STREAMS)])

    def close(self) -> None:
        for side in self._connections:
            for connection in side:
                connection.close()

    async def round(self) -> list[tuple[StreamTurn, StreamTurn]]:
        """Measure one round and return its turns, as pairs (without, with telemetry) of adjacent turns."""
        idle = [await self._spent(child, asyncio.sleep(IDLE_S)) for child in self._sides]
        turns: tuple[list[StreamTurn], list[StreamTurn]] = ([], [])
        seconds = 0.0
        for side in _STREAM_TURNS:
            child = self._sides[side]
            child.request({"telemetry": side == 1, "flush": False})
            self._core_speed.lap()
            turn = await self._spent(child, self._turn(side))
            seconds += turn.wall_s
            turns[side].append(_stream_turn(turn.beyond(idle[side]), self._core_speed.lap()))
        instrumented = self._sides[1]
        scrape = await self._spent(instrumented, asyncio.to_thread(self._looker.scrape))
        poll = _Spent(0.0, 0.0)
        if self._is_polled:
            poll = await self._spent(instrumented, asyncio.to_thread(self._looker.poll))
        flush = await self._spent(
            instrumented, asyncio.to_thread(instrumented.request, {"telemetry": True, "flush": True})
        )
        turn_s = seconds / len(_STREAM_TURNS)
        looked_s = scrape.beyond(idle[1]) * turn_s / SCRAPE_S
        shared_s = looked_s + (poll.beyond(idle[1]) + flush.beyond(idle[1])) / _STREAM_TURNS.count(1)
        return [(off, _stream_turn(on.cpu_s + shared_s, on.core_speed_s)) for off, on in zip(*turns, strict=True)]

    async def _spent(self, child: Child, work: Awaitable[object]) -> _Spent:
        began, cpu_s = self._clock.now(), child.cpu_s()
        await work
        return _Spent(self._clock.now() - began, child.cpu_s() - cpu_s)

    async def _turn(self, side: int) -> None:
        async def use(number: int, connection: Connection) -> None:
            await asyncio.sleep(number * _STAGGER_S)
            for _ in range(NUM_ANSWERS):
                await connection.send(self._request)

        await asyncio.gather(*starmap(use, enumerate(self._connections[side])))
        # What the last answers left is done behind their last bytes, and before this has its answer.
        self._sides[side].request({"telemetry": side == 1, "flush": False})


class _Spent(NamedTuple):
    wall_s: float
    cpu_s: float

    def beyond(self, idle: _Spent) -> float:
        """Return the processor time minus that of an idle period of the same length."""
        return self.cpu_s - self.wall_s * idle.cpu_s / idle.wall_s


def _stream_turn(cpu_s: float, core_speed_s: float) -> StreamTurn:
    return StreamTurn(num_tokens=NUM_STREAMS * NUM_ANSWERS * NUM_TOKENS, cpu_s=cpu_s, core_speed_s=core_speed_s)


def measure_streams(
    place: ProcessPlacement, num_rounds: int, step_s: float, use: TelemetryUse
) -> list[tuple[StreamTurn, StreamTurn]]:
    """Run rounds of streams in new processes; return the turns as pairs (without, with telemetry).

    A worker makes a step every `step_s` seconds; 0: whenever the gateway can accept a message.
    """
    with ExitStack() as stack:
        gateways = Gateways(place, stack, step_s, use)
        rounds = uvloop.run(_rounds(gateways, num_rounds))
        # What was to be on was on.
        lines = [json.loads(line) for line in gateways.log.read_text().splitlines()]
        assert any(line.get("outcome") == "finished" for line in lines) is use.is_all
        assert gateways.sink.last_words()["traces"][0] > 0
    return rounds


async def _rounds(gateways: Gateways, num_rounds: int) -> list[tuple[StreamTurn, StreamTurn]]:
    streams = Streams(gateways.sides, gateways.core_speed, is_polled=gateways.use.is_all)
    async with AsyncExitStack() as stack:
        await streams.open()
        stack.callback(streams.close)
        await streams.round()  # warms up
        return [pair for _ in range(num_rounds) for pair in await streams.round()]
