"""Sends calls when they are due, whatever became of earlier ones; never decides what is sent or keeps what came back.

An open loop (Schroeder, Wierman, Harchol-Balter, NSDI 2006): a server that stalls stalls nobody's sending, and the time
that a request waits counts from when it was due. `max_open` is a safety of this machine's memory and sockets: a loop
that it has held back is no open one any more, so how often and how long is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import aiohttp

from loadtest.client.calls import TimedCall, greedy_call
from loadtest.client.client import Client
from loadtest.client.endpoint import Endpoint
from loadtest.client.records import Record
from loadtest.client.workloads import Workload
from tandem.core.clock import Clock

Sleep = Callable[[float], Awaitable[None]]
Sent = Callable[[float, int], None]
"""At that time, in seconds of the run; so many are open now."""
Ended = Callable[[Record, int], None]
"""So many are still open."""
MAX_OPEN = 4096
BURST = 32
"""Of more requests that are due at once, the first leave and are answered before the last are made. Not after each one:
a client that fell behind would catch up no faster than its event loop turns."""


class OpenLoop:
    """Run once. Of the calls to come it holds one, and the next turn of each conversation."""

    def __init__(
        self, client: Client, clock: Clock, sleep: Sleep, max_open: int, ended: Ended, sent: Sent | None = None
    ) -> None:
        self.num_sent = 0
        self.num_open = 0
        self.most_open = 0
        self.num_held = 0
        self.held_s = 0.0
        self.began = clock.now()
        self._client, self._clock, self._sleep, self._ended, self._sent = client, clock, sleep, ended, sent
        self._places = asyncio.Semaphore(max_open)

    @property
    def now_s(self) -> float:
        return self._clock.now() - self.began

    async def run(self, calls: Iterable[TimedCall]) -> None:
        """Send all of them, in the order in which they are due, and what follows; until the last one has ended."""
        self.began = self._clock.now()
        async with asyncio.TaskGroup() as group:
            for number, call in enumerate(calls):
                await self._until(call.due_s)
                await self._take_place()
                if number % BURST == BURST - 1:
                    await asyncio.sleep(0)
                group.create_task(self._conversation(call))

    async def _conversation(self, call: TimedCall) -> None:
        """It has its place."""
        while True:
            record = await self._send(call)
            self._ended(record, self.num_open)
            if call.follow is None or record.error_kind:
                return
            call = call.follow(record)
            del record
            await self._until(call.due_s)
            await self._take_place()

    async def _send(self, call: TimedCall) -> Record:
        self.num_sent += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if self._sent is not None:
            self._sent(self.now_s, self.num_open)
        try:
            return await self._client.ask(call, self.began, call.due_s)
        finally:
            self.num_open -= 1
            self._places.release()

    async def _until(self, due_s: float) -> None:
        wait = due_s - self.now_s
        if wait > 0:
            await self._sleep(wait)

    async def _take_place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        since = self.now_s
        await self._places.acquire()
        self.num_held += 1
        self.held_s += self.now_s - since


async def ask_in_turn(client: Client, clock: Clock, calls: Iterable[TimedCall], ended: Ended) -> None:
    """Each waits for the one before, and is due then."""
    began = clock.now()
    for call in calls:
        ended(await client.ask(call, began, None), 0)


def open_session() -> aiohttp.ClientSession:
    """A connection for each request: some servers close theirs after an answer, and a request that meets the closing
    would fail."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def ask_endpoint(endpoint: Endpoint, workload: Workload, clock: Clock) -> tuple[Record, ...]:
    """Run one workload of a bench; all records, in the order of its asks. Failures are in the records."""
    records: dict[str, Record] = {}

    def ended(record: Record, _: int) -> None:
        records[record.name] = record

    calls = [greedy_call(endpoint, ask) for ask in workload.asks]
    async with open_session() as session:
        client = Client(endpoint, session, clock)
        if workload.is_sequential:
            await ask_in_turn(client, clock, calls, ended)
        else:
            calls.sort(key=lambda call: call.due_s)
            await OpenLoop(client, clock, asyncio.sleep, MAX_OPEN, ended).run(calls)
    return tuple(records[ask.name] for ask in workload.asks)
