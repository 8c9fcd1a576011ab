"""Provide a scripted gateway that submits jobs to workers and records their Watch streams unchanged."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from types import TracebackType

import grpc.aio

from tandem.core.errors import ErrorKind
from tandem.core.events import (
    Failed,
    JobEvent,
    KVReceived,
    MigrationOffered,
    PromptLogprobs,
    SampledToken,
    TerminalEvent,
    Token,
)
from tandem.core.ids import GatewayId, HandoffId, HandoffKey, JobKey, RequestId, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, Request, ResumeJob, SamplingParams
from tandem.core.worker_load import EngineStats
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.job_codec import Submission, encode_key, encode_submission
from tandem.wire.kv_codec import encode_handoff_key
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.worker_codec import decode_books, decode_refusal, decode_update

PATIENCE_S = 100.0
"""Timeout in seconds after which a test has failed."""

_numbers = itertools.count(1)


def new_request(model: str, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(
        id=RequestId(f"r{next(_numbers)}"),
        model=model,
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


class Client:
    """Own one gateway's view of one worker. `events[key]` holds all events received of a job, in order."""

    def __init__(self, worker: WorkerRef, gateway: str = "g", trust: PeerAuth | None = None) -> None:
        self.worker = worker
        self.gateway = GatewayId(gateway)
        self.events: dict[JobKey, list[JobEvent]] = {}
        self.updates: list[pb.WatchUpdate] = []
        self.load = pb.Load()
        self.stream_error: Exception | None = None
        trust = trust or PeerAuth(gateway)
        self._channel = trust.open_channel(worker.address)
        self.stub = trust.stub(self._channel, worker.incarnation)
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Client:
        await self.watch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.unwatch()
        await self._channel.close(None)

    async def watch(self, positions: dict[JobKey, int] | None = None) -> None:
        """Open the stream and wait for its first message. The worker is asked again whether listed jobs have ended."""
        await self.unwatch()
        for key in positions or {}:
            self.events[key] = [event for event in self.events.get(key, []) if isinstance(event, Token)]
        listed = [pb.WatchPosition(key=encode_key(k), next_index=i) for k, i in (positions or {}).items()]
        num_before = len(self.updates)
        self.stream_error = None
        self._task = asyncio.create_task(self._read(pb.WatchRequest(gateway=self.gateway, positions=listed)))
        await self.until(lambda: len(self.updates) > num_before or self.stream_error is not None)

    async def unwatch(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _read(self, request: pb.WatchRequest) -> None:
        try:
            async for update in self.stub.Watch(request):
                async with self._changed:
                    self.updates.append(update)
                    if update.HasField("load"):
                        self.load = update.load
                    for event in decode_update(update):
                        self.events.setdefault(event.key, []).append(event)
                    self._changed.notify_all()
        except grpc.aio.AioRpcError as error:
            self.stream_error = error
        else:
            self.stream_error = EOFError("the worker ended the stream")
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: object) -> None:
        """Wait for a condition on what was received."""
        assert callable(condition)
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(condition)

    # ---- jobs

    async def submit(self, job: Job) -> None:
        """Raises TandemError when the worker refuses."""
        submission = Submission(self.gateway, self.worker.incarnation, job)
        reply = await self.stub.Submit(encode_submission(submission), timeout=PATIENCE_S)
        if reply.HasField("refusal"):
            raise decode_refusal(reply.refusal)

    async def generate(self, request: Request, attempt: int = 1, output: Sequence[int] = ()) -> JobKey:
        job = GenerateJob(request=request, attempt=attempt, output_tokens=tuple(output))
        await self.submit(job)
        return job.key

    async def cancel(self, *keys: JobKey) -> None:
        await self.stub.Cancel(pb.CancelRequest(keys=[encode_key(key) for key in keys]), timeout=PATIENCE_S)

    async def release(self, key: HandoffKey) -> None:
        await self.stub.Release(pb.ReleaseRequest(key=encode_handoff_key(key)), timeout=PATIENCE_S)

    # ---- what came

    def tokens(self, key: JobKey) -> list[int]:
        """Token ids, after a check that their indices follow each other without a gap or a repeat."""
        tokens = [event for event in self.events.get(key, []) if isinstance(event, Token)]
        first = tokens[0].index if tokens else 0
        assert [token.index for token in tokens] == list(range(first, first + len(tokens)))
        return [token.token.id for token in tokens]

    def scores(self, key: JobKey) -> list[SampledToken]:
        """Return the prompt's scores from its second token on, after a check that none is missing; repeated ones are
        allowed.
        """
        found: list[SampledToken] = []
        for event in self.events.get(key, []):
            if isinstance(event, PromptLogprobs):
                assert 1 <= event.first_index <= 1 + len(found)
                found[event.first_index - 1 :] = event.tokens
        return found

    def pulled(self, key: JobKey) -> KVReceived | None:
        return next((event for event in self.events.get(key, []) if isinstance(event, KVReceived)), None)

    def ends(self, key: JobKey) -> list[TerminalEvent]:
        others = (Token, PromptLogprobs, KVReceived, MigrationOffered)
        return [event for event in self.events.get(key, []) if not isinstance(event, others)]

    def offers(self, key: JobKey) -> list[HandoffKey]:
        """Return the worker's migration offers of a job while it drained, the newest last."""
        return [event.offer for event in self.events.get(key, []) if isinstance(event, MigrationOffered)]

    async def end_of(self, key: JobKey) -> TerminalEvent:
        await self.until(lambda: self.ends(key) or self.stream_error is not None)
        ends = self.ends(key)
        assert ends, f"the stream broke before {key} ended: {self.stream_error!r}"
        assert len(ends) == 1, f"{key} ended more than once: {ends}"
        return ends[0]

    async def failure(self, key: JobKey, kind: ErrorKind) -> Failed:
        """Return the failure with which a job ended, after a check of its kind."""
        end = await self.end_of(key)
        assert isinstance(end, Failed) and end.kind is kind, end
        return end

    async def num_tokens(self, key: JobKey, at_least: int) -> None:
        await self.until(lambda: len(self.tokens(key)) >= at_least or self.ends(key))
        assert len(self.tokens(key)) >= at_least, f"{key} ended early: {self.ends(key)}"

    # ---- the worker

    async def books(self) -> EngineStats:
        """Return the worker's engine statistics; retry while a step keeps the worker from counting."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                reply = await self.stub.Describe(pb.DescribeRequest(), timeout=PATIENCE_S)
                if reply.HasField("books"):
                    return decode_books(reply.books)

    async def under_read(self) -> None:
        """Wait until the worker reads blocks of another worker."""
        async with asyncio.timeout(PATIENCE_S):
            while not (await self.books()).num_reading_blocks:
                await asyncio.sleep(0.005)

    async def settled(self) -> EngineStats:
        """Wait until the statistics are back to zero; return the last ones."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                books = await self.books()
                held = (
                    books.num_table_blocks,
                    books.num_leased_blocks,
                    books.num_reading_blocks,
                    books.num_sequences,
                    books.num_leases,
                    books.num_pulls,
                )
                if not any(held):
                    assert books.num_free_blocks == books.num_blocks
                    return books
                await asyncio.sleep(0.02)


async def settled(*clients: Client) -> None:
    """Wait until none of the workers holds anything."""
    for client in clients:
        await client.settled()


async def resume_from(
    source: WorkerRef, consumer: Client, request: Request, handoff: HandoffId | None = None
) -> JobKey:
    """Resume a request at the consumer."""
    job = ResumeJob(request=request, attempt=1, handoff=handoff or HandoffId(f"h-{request.id}"), source=source)
    await consumer.submit(job)
    return job.key


async def hand_over(
    producer: Client, consumer: Client, request: Request, attempt: int = 1, output: Sequence[int] = ()
) -> tuple[JobKey, HandoffKey]:
    """Resume at the consumer, then prefill at the producer, as the design orders it."""
    handoff = HandoffId(f"h-{request.id}")
    known = tuple(output)
    resume = ResumeJob(request=request, attempt=attempt, output_tokens=known, handoff=handoff, source=producer.worker)
    prefill = PrefillJob(request=request, attempt=attempt, output_tokens=known, handoff=handoff)
    await consumer.submit(resume)
    await producer.submit(prefill)
    return resume.key, HandoffKey(handoff, attempt)
