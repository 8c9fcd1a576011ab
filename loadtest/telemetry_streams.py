"""Rounds of streams through gateways with and without telemetry, and what each token of them took; decides nothing.

A round goes to one gateway: as many connections as there are streams ask again and again, until the time is over. Who
looks at a gateway with telemetry does so once in each second of its rounds: a scrape, and a console's poll.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import msgspec
import uvloop

from loadtest.door_backend import BY_STEP
from loadtest.door_client import Connection, ask
from loadtest.telemetry_sides import Child, Place, pushing, sink
from tandem.core.clock import SystemClock
from tandem.stores.embedded import EmbeddedServer

NUM_TOKENS = 128
"""Of an answer. What a request costs once is borne by so many."""
NUM_STREAMS = 32
LOOKED_AT = ("/metrics",)


class StreamRound(msgspec.Struct, frozen=True, kw_only=True):
    """`cpu_s`: processor time of the gateway's process since its last round began, so that nothing that it does later,
    while the other one has its turn, is left out."""

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


class Streams:
    """The connections to both, and their rounds."""

    def __init__(self, gateways: Gateways) -> None:
        self._sides = gateways.sides
        self._clock = SystemClock()
        self._connections: list[list[Connection]] = []
        self._lookers: list[Connection] = []

    async def open(self) -> None:
        for side in self._sides:
            url = side.said["url"]
            self._connections.append([await Connection.open(url, self._clock) for _ in range(NUM_STREAMS)])
        self._lookers = [await Connection.open(self._sides[1].said["url"], self._clock) for _ in LOOKED_AT]

    def close(self) -> None:
        for connection in [*self._lookers, *(each for side in self._connections for each in side)]:
            connection.close()

    async def round(self, side: int, seconds: float) -> tuple[int, float]:
        """How many tokens came, and in what time."""
        request, began, num_answers = ask(BY_STEP, NUM_TOKENS, stream=True), self._clock.now(), 0

        async def use(connection: Connection) -> None:
            nonlocal num_answers
            while self._clock.now() - began < seconds:
                await connection.send(request)
                num_answers += 1

        looking = [self._look(*item, seconds) for item in zip(self._lookers, LOOKED_AT, strict=True)] if side else []
        await asyncio.gather(*(use(connection) for connection in self._connections[side]), *looking)
        return num_answers * NUM_TOKENS, self._clock.now() - began

    async def _look(self, connection: Connection, path: str, seconds: float) -> None:
        for number in range(max(1, round(seconds))):
            await asyncio.sleep(0.5 if number == 0 else 1.0)
            await connection.send(f"GET {path} HTTP/1.1\r\nhost: door\r\n\r\n".encode())


def measure_streams(place: Place, num_pairs: int, seconds: float) -> list[tuple[StreamRound, StreamRound]]:
    """Pairs (without, with) of fresh processes."""
    with ExitStack() as stack:
        gateways = Gateways(place, stack)
        pairs = uvloop.run(_rounds(gateways, num_pairs, seconds))
        # What was to be on was on.
        assert json.loads(gateways.log.read_text().splitlines()[-1])["outcome"] == "finished"
        # assert gateways.sink.last_words()["traces"][0] > 0
    return pairs


async def _rounds(gateways: Gateways, num_pairs: int, seconds: float) -> list[tuple[StreamRound, StreamRound]]:
    streams = Streams(gateways)
    async with AsyncExitStack() as stack:
        await streams.open()
        stack.callback(streams.close)
        for side in (0, 1):  # warms up
            await streams.round(side, seconds)
        pairs: list[tuple[StreamRound, StreamRound]] = []
        for number in range(num_pairs):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            before = [side.cpu_s() for side in gateways.sides]
            found = {side: await streams.round(side, seconds) for side in order}
            used = [side.cpu_s() - at for side, at in zip(gateways.sides, before, strict=True)]
            off, on = (_round(found[side], used[side]) for side in (0, 1))
            pairs.append((off, on))
    return pairs


def _round(found: tuple[int, float], cpu_s: float) -> StreamRound:
    return StreamRound(num_tokens=found[0], wall_s=found[1], cpu_s=cpu_s)
