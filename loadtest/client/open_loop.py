"""Send calls when they are due, whether or not earlier calls have ended (an open loop).

In an open loop (Schroeder, Wierman, Harchol-Balter, NSDI 2006) a server that stalls does not delay later requests, and
the time that a request waits counts from when it was due. `max_open` protects this machine's memory and sockets: a loop
that the limit has delayed is no longer open, so the number and the length of such delays are counted.
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
"""Called when a request is sent, with the time in seconds of the run and the number of requests now open."""
Ended = Callable[[Record, int], None]
"""Called when a request has ended, with its record and the number of requests still open."""
MAX_OPEN = 4096
BURST = 32
"""After this many calls the sender yields to the event loop.

The first calls of a large burst are then sent and answered before the last are built. Yielding after every call would
let a client that fell behind catch up no faster than its event loop turns.
"""


class OpenLoop:
    """Send the calls of one schedule when they are due; use each instance once.

    It holds the next call that is not yet due, and the next turn of each conversation.
    """

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
        self._slots = asyncio.Semaphore(max_open)

    @property
    def now_s(self) -> float:
        return self._clock.now() - self.began

    async def run(self, calls: Iterable[TimedCall]) -> None:
        """Send all calls in the order in which they are due, with the later turns of their conversations, and wait for
        the end."""
        self.began = self._clock.now()
        async with asyncio.TaskGroup() as group:
            for number, call in enumerate(calls):
                await self._until(call.due_s)
                await self._acquire_slot()
                if number % BURST == BURST - 1:
                    await asyncio.sleep(0)
                group.create_task(self._conversation(call))

    async def _conversation(self, call: TimedCall) -> None:
        """Send a call and the turns that follow it. The caller has acquired a slot for the first call."""
        while True:
            record = await self._send(call)
            self._ended(record, self.num_open)
            if call.follow is None or record.error_kind:
                return
            call = call.follow(record)
            del record
            await self._until(call.due_s)
            await self._acquire_slot()

    async def _send(self, call: TimedCall) -> Record:
        self.num_sent += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if self._sent is not None:
            self._sent(self.now_s, self.num_open)
        try:
            return await self._client.send(call, self.began, call.due_s)
        finally:
            self.num_open -= 1
            self._slots.release()

    async def _until(self, due_s: float) -> None:
        wait = due_s - self.now_s
        if wait > 0:
            await self._sleep(wait)

    async def _acquire_slot(self) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        since = self.now_s
        await self._slots.acquire()
        self.num_held += 1
        self.held_s += self.now_s - since


async def send_sequentially(client: Client, clock: Clock, calls: Iterable[TimedCall], ended: Ended) -> None:
    """Send the calls one at a time; each is due when the call before it has ended."""
    began = clock.now()
    for call in calls:
        ended(await client.send(call, began, None), 0)


def open_session() -> aiohttp.ClientSession:
    """Open a session that uses a new connection for each request.

    Some servers close the connection after an answer, and a request sent on a connection that is being closed would
    fail.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def run_workload(endpoint: Endpoint, workload: Workload, clock: Clock) -> tuple[Record, ...]:
    """Run one workload of a bench and return all records in the order of its requests, failed ones included."""
    records: dict[str, Record] = {}

    def ended(record: Record, _: int) -> None:
        records[record.name] = record

    calls = [greedy_call(endpoint, request) for request in workload.requests]
    async with open_session() as session:
        client = Client(endpoint, session, clock)
        if workload.is_sequential:
            await send_sequentially(client, clock, calls, ended)
        else:
            calls.sort(key=lambda call: call.due_s)
            await OpenLoop(client, clock, asyncio.sleep, MAX_OPEN, ended).run(calls)
    return tuple(records[request.name] for request in workload.requests)
