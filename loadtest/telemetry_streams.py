"""Rounds of streams through gateways with and without telemetry, and what each token of them took; decides nothing.

As many connections as there are streams ask again and again, until a turn is over. Who looks at the gateway with
telemetry does so once in a round: a scrape, and a console's poll.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import NamedTuple

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


class StreamRound(msgspec.Struct, frozen=True, kw_only=True):
    """`cpu_s`: processor time of the gateway's process over the whole round, so that nothing that it does later, while
    the other one has its turn, is left out."""

    num_tokens: int
    wall_s: float
    cpu_s: float

    @property
    def token_s(self) -> float:
        """Processor time."""
        return self.cpu_s / self.num_tokens


class Gateways:
    """Two of them, on one core, each before a worker of its own that draws tokens from a list."""

    def __init__(self, place: Place, stack: ExitStack) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-telemetry-")))
        redis = stack.enter_context(EmbeddedServer.start())
        self.sink = sink(stack)
        self.log = directory / "gateway.log"
        pushed = pushing(self.sink.said["endpoint"])

        def start(*arguments: str, **more: str) -> Child:
            is_off = arguments[0] == "off"
            worker = Child(stack, [sys.executable, "-m", "loadtest.door_worker"], place.environment()).said["worker"]
            shared = ("--worker", worker, "--redis", redis.url)
            command = place.command("telemetry_server", *arguments, *shared, is_off=is_off)
            return Child(stack, command, place.environment(is_off=is_off) | more)

        self.sides = [start("off"), start("on", "--log", str(self.log), **pushed)]


class _Turn(NamedTuple):
    num_tokens: int
    wall_s: float


class Looker:
    """A Prometheus and a console."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen = "life=&since=0"

    def look(self) -> None:
        get(f"{self._url}/metrics")
        state = json.loads(get(f"{self._url}/console/state?{self._seen}"))
        self._seen = f"life={state['gateway']['life']}&since={state['number']}"


class Streams:
    """The connections to both, and their rounds."""

    def __init__(self, sides: Sequence[Child]) -> None:
        self._sides = sides
        self._clock = SystemClock()
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

    async def round(self, seconds: float) -> tuple[StreamRound, StreamRound]:
        """Each side has its turns for so many seconds."""
        began = [side.cpu_s() for side in self._sides]
        turns: tuple[list[_Turn], list[_Turn]] = ([], [])
        for number, side in enumerate(TURNS, 1):
            looking = asyncio.gather(*([asyncio.to_thread(self._looker.look)] if number == len(TURNS) else []))
            turns[side].append(await self._turn(side, seconds / NUM_TURNS))
            await looking
        off, on = (
            StreamRound(
                num_tokens=sum(turn.num_tokens for turn in turns[side]),
                wall_s=sum(turn.wall_s for turn in turns[side]),
                cpu_s=self._sides[side].cpu_s() - began[side],
            )
            for side in (0, 1)
        )
        return off, on

    async def _turn(self, side: int, seconds: float) -> _Turn:
        request, began, num_answers = ask(BY_STEP, NUM_TOKENS, stream=True), self._clock.now(), 0

        async def use(connection: Connection) -> None:
            nonlocal num_answers
            while self._clock.now() - began < seconds:
                await connection.send(request)
                num_answers += 1

        await asyncio.gather(*(use(connection) for connection in self._connections[side]))
        return _Turn(num_answers * NUM_TOKENS, self._clock.now() - began)


def measure_streams(place: Place, num_rounds: int, seconds: float) -> list[tuple[StreamRound, StreamRound]]:
    """Rounds (without, with) of fresh processes."""
    with ExitStack() as stack:
        gateways = Gateways(place, stack)
        rounds = uvloop.run(_rounds(gateways, num_rounds, seconds))
        # What was to be on was on.
        assert json.loads(gateways.log.read_text().splitlines()[-1])["outcome"] == "finished"
        assert gateways.sink.last_words()["traces"][0] > 0
    return rounds


async def _rounds(gateways: Gateways, num_rounds: int, seconds: float) -> list[tuple[StreamRound, StreamRound]]:
    streams = Streams(gateways.sides)
    async with AsyncExitStack() as stack:
        await streams.open()
        stack.callback(streams.close)
        await streams.round(seconds)  # warms up
        return [await streams.round(seconds) for _ in range(num_rounds)]
