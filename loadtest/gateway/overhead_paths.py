"""Define the three request paths that `loadtest.gateway.overhead` compares, and record the times of their tokens.

Each path imports its needs when it is made, because torch must not be imported before the process is prepared.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tandem.core.clock import Clock
from tandem.core.config import Config
from tandem.core.events import Finished, Token
from tandem.core.ids import GatewayId, JobKey, RequestId, WorkerRef
from tandem.core.request import GenerateJob, Request, SamplingParams

NAME = "measured"
"""Name of the measured model, whichever it is."""
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Served:
    """Times of one served request in seconds: from sending it to its first token, and between its tokens."""

    first_s: float
    gaps_s: tuple[float, ...]
    num_tokens: int

    @property
    def token_s(self) -> float:
        """Return the mean seconds per token after the first."""
        return sum(self.gaps_s) / (self.num_tokens - 1)


class Prompts:
    """Generate requests whose prompts share no block."""

    def __init__(self, num_input: int, num_output: int) -> None:
        self._num_input = num_input
        self._sampling = SamplingParams(max_tokens=num_output, temperature=0.0)
        self._taken = 0

    def take(self, count: int) -> list[Request]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Request:
        self._taken += 1
        digits = [(self._taken >> (7 * place)) & 127 for place in range(3)]
        tokens = tuple(1 + digit for digit in digits) + tuple(range(1, self._num_input - 2))
        name = RequestId(f"overhead-{self._taken}")
        return Request(id=name, model=NAME, prompt_tokens=tokens, sampling=self._sampling)


SendPath = Callable[[list[Request]], Awaitable[list[Served]]]
"""Sends requests at once and waits for all."""


class Log:
    """Record the arrival times of the tokens of open requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: dict[str, float] = {}
        self._stamps: dict[str, list[float]] = {}

    def begin(self, request: Request) -> None:
        self._began[request.id] = self._clock.now()
        self._stamps[request.id] = []

    def on_token(self, request: str) -> None:
        self._stamps[request].append(self._clock.now())

    def served(self, request: Request) -> Served:
        stamps, began = self._stamps.pop(request.id), self._began.pop(request.id)
        gaps = tuple(after - before for before, after in itertools.pairwise(stamps))
        return Served(stamps[0] - began, gaps, request.sampling.max_tokens)


# ---- inside this process


class EnginePath:
    """Request path into an engine and executor in this process, driven as in a worker, without a server."""

    def __init__(self, config: Config, clock: Clock) -> None:
        from tandem.engine.factory import build_engine
        from tandem.worker.model.worker_model import load_worker_model

        model = load_worker_model(config)
        self._engine = build_engine(config, model.executor, model.fingerprint, model.max_model_len)
        self._executor = model.executor
        self._clock = clock

    async def __call__(self, requests: list[Request]) -> list[Served]:
        return await asyncio.to_thread(self._run, requests)

    def _run(self, requests: list[Request]) -> list[Served]:

        log, engine, now = Log(self._clock), self._engine, self._clock.now
        for request in requests:
            log.begin(request)
            engine.submit(GenerateJob(request=request, attempt=1), now())
        while not engine.is_idle:
            plan, _ = engine.begin(now())
            assert plan is not None
            for effect in engine.finish(self._executor.execute(plan), now()):
                if isinstance(effect, Token):
                    log.on_token(effect.key.request)
        return [log.served(request) for request in requests]


# ---- by gRPC


class GrpcPath:
    """Request path to the worker over gRPC, as a gateway uses it, without a gateway."""

    def __init__(self, worker: WorkerRef, clock: Clock) -> None:
        from tandem.wire.channels import open_channel
        from tandem.wire.gen.worker_pb2_grpc import WorkerStub

        self._me, self._worker = GatewayId("overhead"), worker
        self._log = Log(clock)
        self._ends: dict[JobKey, asyncio.Future[None]] = {}
        self._channel = open_channel(worker.address)
        self._stub = WorkerStub(self._channel)
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> GrpcPath:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close(None)

    async def __call__(self, requests: list[Request]) -> list[Served]:
        jobs = [GenerateJob(request=request, attempt=1) for request in requests]
        ends = [self._ends.setdefault(job.key, asyncio.get_running_loop().create_future()) for job in jobs]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(self._submit(job) for job in jobs), *ends)
        return [self._log.served(request) for request in requests]

    async def _submit(self, job: GenerateJob) -> None:
        from tandem.wire.job_codec import Submission, encode_submission
        from tandem.wire.worker_codec import decode_refusal

        self._log.begin(job.request)
        reply = await self._stub.Submit(encode_submission(Submission(self._me, self._worker.incarnation, job)))
        if reply.HasField("refusal"):
            raise decode_refusal(reply.refusal)

    async def _read(self) -> None:
        from tandem.wire.gen import worker_pb2 as pb
        from tandem.wire.worker_codec import decode_update

        async for update in self._stub.Watch(pb.WatchRequest(gateway=self._me)):
            for event in decode_update(update):
                if isinstance(event, Token):
                    self._log.on_token(event.key.request)
                elif isinstance(event, Finished):
                    self._ends.pop(event.key).set_result(None)


# ---- by HTTP


class HttpPath:
    """Request path to the gateway: streamed completions over persistent HTTP connections, parsed as cheaply as
    possible."""

    def __init__(self, url: str, clock: Clock) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._where = (host, int(port))
        self._log = Log(clock)
        self._idle: list[_Connection] = []

    async def __call__(self, requests: list[Request]) -> list[Served]:
        loop = asyncio.get_running_loop()
        while len(self._idle) < len(requests):
            _, connection = await loop.create_connection(lambda: _Connection(self._log), *self._where)
            self._idle.append(connection)
        taken = [self._idle.pop() for _ in requests]
        async with asyncio.timeout(PATIENCE_S):
            pairs = zip(taken, requests, strict=True)
            await asyncio.gather(*(connection.send(request) for connection, request in pairs))
        self._idle += taken
        return [self._log.served(request) for request in requests]


class _Connection(asyncio.Protocol):
    """Connection that carries one request at a time.

    Every event of the stream that holds a choice is a token, except the last, which holds the finish reason.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._transport: Any = None
        self._request = ""
        self._rest = b""
        self._end: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    async def send(self, request: Request) -> None:
        body = {
            "model": NAME,
            "prompt": request.prompt_tokens,
            "max_tokens": request.sampling.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            # Yields an event for each token, even where the token has no text.
            "return_token_ids": True,
            "stream": True,
        }
        text = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n"
        self._request, self._end = request.id, asyncio.get_running_loop().create_future()
        self._log.begin(request)
        self._transport.write(head.encode() + text)
        await self._end

    def data_received(self, data: bytes) -> None:
        assert self._end is not None
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if b'"finish_reason":null' in event:
                self._log.on_token(self._request)
            elif b'"error"' in event:
                self._end.set_exception(RuntimeError(event.decode()))
        if self._rest.endswith(b"0\r\n\r\n"):
            self._rest = b""
            self._end.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(RuntimeError(f"the connection was lost: {error}"))
