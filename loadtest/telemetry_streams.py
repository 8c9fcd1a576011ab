"""Rounds of streams through gateways with and without telemetry, and what each token of them took; decides nothing.

In a turn as many connections as there are streams ask once, a little after each other. The worker makes a step every so
often, as an engine does, and so its messages carry the tokens of all that run. One that waits for nothing carries a few
of whoever came first, the fewer the later the others come: then whatever a request costs more makes all tokens of all
others cost more, and it is the worker that is measured.

Who looks at the gateway with telemetry are a console, in each of its turns, and a Prometheus, in one of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import starmap
from pathlib import Path

import msgspec
import uvloop

from loadtest.door_backend import BY_STEP
from loadtest.door_client import Connection, ask
from loadtest.telemetry_sides import NUM_TURNS, TURNS, Child, Place, get, pushing, sink
from tandem.core.clock import SystemClock
from tandem.stores.embedded import EmbeddedServer

NUM_TOKENS = 128
"""Of an answer. What a request costs once is borne by so many."""
NUM_STREAMS = 32
STEP_S = 0.004
"""Between two messages of a worker. The gateway is busy for half of it."""
_STAGGER_S = 0.01
"""Between the beginnings of two streams of a turn, so that answers do not end all at once."""


class StreamRound(msgspec.Struct, frozen=True, kw_only=True):
    """`cpu_s`: processor time of the gateway's process over the whole round, so that nothing that it does later, while
    the other one has its turn, is left out."""

    num_tokens: int
    cpu_s: float

    @property
    def token_s(self) -> float:
        """Processor time."""
        return self.cpu_s / self.num_tokens


class Gateways:
    """Two of them, on one core, each before a worker of its own that draws tokens from a list."""

    def __init__(self, place: Place, stack: ExitStack, step_s: float) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-telemetry-")))
        redis = stack.enter_context(EmbeddedServer.start())
        self.sink = sink(stack)
        self.log = directory / "gateway.log"
        pushed = pushing(self.sink.said["endpoint"])

        def start(*arguments: str, **more: str) -> Child:
            is_off = arguments[0] == "off"
            stepping = [sys.executable, "-m", "loadtest.door_worker", "--step-ms", str(1e3 * step_s)]
            worker = Child(stack, stepping, place.environment()).said["worker"]
            shared = ("--worker", worker, "--redis", redis.url)
            command = place.command("telemetry_server", *arguments, *shared, is_off=is_off)
            return Child(stack, command, place.environment(is_off=is_off) | more)

        self.sides = [start("off"), start("on", "--log", str(self.log), **pushed)]


class Looker:
    """A Prometheus and a console."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen = "life=&since=0"

    def poll(self) -> None:
        state = json.loads(get(f"{self._url}/console/state?{self._seen}"))
        self._seen = f"life={state['gateway']['life']}&since={state['number']}"

    def scrape(self) -> None:
        get(f"{self._url}/metrics")


class Streams:
    """The connections to both, and their rounds."""

    def __init__(self, sides: Sequence[Child]) -> None:
        self._sides = sides
        self._clock = SystemClock()
        self._request = ask(BY_STEP, NUM_TOKENS, stream=True)
        self._connections: list[list[Connection]] = []
        self._looker = Looker(sides[1].said["url"])

    async def open(self) -> None:
        for side in self._sides:
            url = side.said["url"]
            self._connections.append([await Connection.open(url, self._clock) for _ in range(NUM_STREAMS)])

    def close(self) -> None:
        for side in self._connections:
            for connection in side:
                connection.close()

    async def round(self) -> tuple[StreamRound, StreamRound]:
        began = [side.cpu_s() for side in self._sides]
        for number, side in enumerate(TURNS, 1):
            looks = [self._looker.poll] if side else []
            if number == len(TURNS):
                looks.append(self._looker.scrape)
            await asyncio.gather(self._turn(side), *map(asyncio.to_thread, looks))
        num_tokens = NUM_TURNS * NUM_STREAMS * NUM_TOKENS
        off, on = (
            StreamRound(num_tokens=num_tokens, cpu_s=side.cpu_s() - before)
            for side, before in zip(self._sides, began, strict=True)
        )
        return off, on

    async def _turn(self, side: int) -> None:
        async def use(number: int, connection: Connection) -> None:
            await asyncio.sleep(number * _STAGGER_S)
            await connection.send(self._request)

        await asyncio.gather(*starmap(use, enumerate(self._connections[side])))


def measure_streams(place: Place, num_rounds: int, step_s: float) -> list[tuple[StreamRound, StreamRound]]:
    """Rounds (without, with) of fresh processes. A worker makes a step each `step_s`; 0: whenever there is room."""
    with ExitStack() as stack:
        gateways = Gateways(place, stack, step_s)
        rounds = uvloop.run(_rounds(gateways, num_rounds))
        # What was to be on was on.
        assert json.loads(gateways.log.read_text().splitlines()[-1])["outcome"] == "finished"
        assert gateways.sink.last_words()["traces"][0] > 0
    return rounds


async def _rounds(gateways: Gateways, num_rounds: int) -> list[tuple[StreamRound, StreamRound]]:
    streams = Streams(gateways.sides)
    async with AsyncExitStack() as stack:
        await streams.open()
        stack.callback(streams.close)
        await streams.round()  # warms up
        return [await streams.round() for _ in range(num_rounds)]
