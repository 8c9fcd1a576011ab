"""Start worker processes for a measurement, talk to them and end them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import grpc.aio
import msgspec

from tandem.core.clock import Clock
from tandem.core.events import Cancelled, Failed, JobEvent
from tandem.core.ids import GatewayId, Incarnation, JobKey, WorkerId, WorkerRef
from tandem.core.request import Job
from tandem.wire.channels import open_channel
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.job_codec import Submission, encode_submission
from tandem.wire.worker_codec import decode_refusal, decode_update

START_S = 600.0
"""Seconds that a start may take; the first one may fetch and convert the model."""
STOP_S = 30.0
REPLY_S = 30.0
PROGRESS_S = 300.0
"""Seconds without an event of a job after which a measurement is abandoned."""
LOG_TAIL = 1500

_GATEWAY = GatewayId("loadtest")

Stamped = tuple[float, JobEvent]


class MeasurementError(Exception):
    """Raised when the measured event did not happen; the message gives the reason."""


class WorkerProcess:
    """A `tandem worker` process that serves. `ref`: its identity, with the address at which it serves."""

    def __init__(self, process: asyncio.subprocess.Process, ref: WorkerRef) -> None:
        self._process = process
        self.ref = ref

    async def kill(self) -> None:
        """Kill the process with SIGKILL and wait until it has ended."""
        self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        """Stop the process in order, or kill it where that takes too long; do nothing where it has ended."""
        await _end(self._process)


async def start_worker(
    pool: str, flags: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> WorkerProcess:
    """Start a `tandem worker` process, and return once it serves; its log goes to the file `log`.

    `environment`: its variables; those of this process by default. Raises MeasurementError where it does not start.
    """
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tandem.cli", "worker", "--pool", pool, *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
    try:
        return WorkerProcess(process, await _first_words(process, log))
    except BaseException:
        await _end(process)
        raise


@contextlib.asynccontextmanager
async def running_worker(pool: str, flags: Sequence[str], log: Path) -> AsyncIterator[WorkerRef]:
    """Run a `tandem worker` process without Redis inside the context; its log goes to the file `log`."""
    worker = await start_worker(pool, flags, log)
    try:
        yield worker.ref
    finally:
        await worker.end()


async def _first_words(process: asyncio.subprocess.Process, log: Path) -> WorkerRef:
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        line = await process.stdout.readline()
    if not line:
        raise MeasurementError(f"a worker did not start:\n{_tail(log)}")
    hello = msgspec.json.decode(line)
    return WorkerRef(WorkerId(hello["worker"]), Incarnation(hello["incarnation"]), hello["address"])


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:]


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


class WorkerClient:
    """Client of one worker, as a gateway has; every event is kept with its arrival time."""

    def __init__(self, worker: WorkerRef, clock: Clock) -> None:
        self.worker = worker
        self.model = ""
        self._clock = clock
        self._events: dict[JobKey, list[Stamped]] = {}
        self._channel = open_channel(worker.address)
        self._stub = WorkerStub(self._channel)
        self._changed = asyncio.Condition()
        self._is_watching = self._is_broken = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WorkerClient:
        self._watch = asyncio.create_task(self._read())
        async with asyncio.timeout(REPLY_S), self._changed:
            await self._changed.wait_for(lambda: self._is_watching or self._is_broken)
        self.model = (await self._stub.Describe(pb.DescribeRequest(), timeout=REPLY_S)).model
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._channel.close(None)

    async def submit(self, job: Job) -> None:
        """Submit a job to the worker. Raises TandemError when the worker refuses it."""
        submission = Submission(_GATEWAY, self.worker.incarnation, job)
        reply = await self._stub.Submit(encode_submission(submission), timeout=REPLY_S)
        if reply.HasField("refusal"):
            raise decode_refusal(reply.refusal)

    async def first(self, key: JobKey, matches: Callable[[JobEvent], bool]) -> Stamped:
        """Wait for the first event of a job for which `matches` is true, and return it with its arrival time.

        Raises MeasurementError when no such event can arrive any more.
        """
        async with asyncio.timeout(PROGRESS_S), self._changed:
            await self._changed.wait_for(lambda: self._find(key, matches) or self._is_over(key))
        found = self._find(key, matches)
        if found is None:
            failures = [event for _, event in self._events.get(key, []) if isinstance(event, Failed | Cancelled)]
            raise MeasurementError(f"{key} ended at {self.worker}: {failures or 'the stream broke'}")
        return found

    async def drain(self, timeout_s: float) -> pb.DrainReply:
        """Drain the worker: it accepts no new jobs; return its reply when no job is left or after `timeout_s`
        seconds."""
        request = pb.DrainRequest(timeout_ms=int(timeout_s * 1e3))
        return await self._stub.Drain(request, timeout=timeout_s + REPLY_S)

    async def undo_drain(self) -> None:
        """Let a drained worker accept jobs again."""
        await self._stub.UndoDrain(pb.UndoDrainRequest(), timeout=REPLY_S)

    def events_of(self, key: JobKey) -> list[Stamped]:
        return list(self._events.get(key, []))

    def _find(self, key: JobKey, matches: Callable[[JobEvent], bool]) -> Stamped | None:
        return next((stamped for stamped in self._events.get(key, []) if matches(stamped[1])), None)

    def _is_over(self, key: JobKey) -> bool:
        return self._is_broken or self._find(key, lambda event: isinstance(event, Failed | Cancelled)) is not None

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # `first` reports the broken stream to its caller
            async for update in self._stub.Watch(pb.WatchRequest(gateway=_GATEWAY)):
                await self._take_in(update)
        self._is_broken = True
        await self._wake()

    async def _take_in(self, update: pb.WatchUpdate) -> None:
        now = self._clock.now()
        for event in decode_update(update):
            self._events.setdefault(event.key, []).append((now, event))
        self._is_watching = True
        await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
