"""Serve the rpcs of worker.proto: decode requests to engine commands, and encode events to messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from tandem.core.clock import Clock
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import Grammar
from tandem.core.ids import GatewayId, JobKey
from tandem.core.request import Job
from tandem.core.worker_load import DrainResult
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.wire.gen import kv_pb2, worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer
from tandem.wire.idle_timeout import IdleTimeout
from tandem.wire.job_codec import Submission, decode_key, decode_submission
from tandem.wire.kv_codec import decode_handoff_key, decode_worker
from tandem.wire.link_codec import encode_link
from tandem.wire.worker_codec import encode_books, encode_load, encode_refusal, encode_step_cost, encode_update
from tandem.worker.engine.driver import EngineDriver, EngineSnapshot
from tandem.worker.gateways.outbox import GatewayStream, WatchSessions
from tandem.worker.kv.handoff_service import HandoffService
from tandem.worker.links.link_monitor import LinkMonitor
from tandem.worker.model.worker_info import WorkerDescriptor

BOOKS_S = 0.5
"""Seconds for which Describe waits for a running step before it answers without engine statistics."""
READ_S = 1.0
"""Shortest time in seconds that a gateway has to read a message, also where worker.gateway_grace_s is less or 0."""

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(WorkerServicer):
    """Serve the rpcs of worker.proto for one worker; all methods run on the event loop.

    `prepare`: compiles the grammar of a job before the job starts. `snapshot`: the newest state of the engine that
    `on_snapshot` has received.
    """

    def __init__(
        self,
        descriptor: WorkerDescriptor,
        driver: EngineDriver,
        gateways: WatchSessions,
        handoffs: HandoffService,
        link_monitor: LinkMonitor,
        clock: Clock,
        prepare: Callable[[Grammar], Awaitable[None]],
    ) -> None:
        self._prepare = prepare
        self._descriptor = descriptor
        self._identity = descriptor.identity
        self._driver = driver
        self._gateways = gateways
        self._handoffs = handoffs
        self._link_monitor = link_monitor
        self._clock = clock
        self.snapshot = EngineSnapshot()
        self._has_changed = asyncio.Event()
        self._is_draining = False
        self._is_stopping = False

    def on_snapshot(self, snapshot: EngineSnapshot) -> None:
        self.snapshot = snapshot
        self._has_changed.set()

    # ---- jobs

    async def Submit(self, request: worker_pb2.SubmitRequest, context: _Context) -> worker_pb2.SubmitReply:
        reply = worker_pb2.SubmitReply()
        try:
            submission = self._read_submission(request)
            grammar = submission.job.request.sampling.grammar
            if grammar is not None:
                await self._prepare(grammar)
            await self._accept(submission)
        except TandemError as refusal:
            reply.refusal.CopyFrom(encode_refusal(refusal.kind, refusal.message))
        reply.load.CopyFrom(encode_load(self.snapshot.load))
        return reply

    async def Cancel(self, request: worker_pb2.CancelRequest, context: _Context) -> worker_pb2.CancelReply:
        async with _abort_on_error(context):
            keys = [decode_key(key) for key in request.keys]
            await asyncio.wrap_future(self._driver.call(lambda engine, now: (None, _cancel(engine, keys, now))))
        return worker_pb2.CancelReply()

    async def OfferMigration(
        self, request: worker_pb2.OfferMigrationRequest, context: _Context
    ) -> worker_pb2.OfferMigrationReply:
        async with _abort_on_error(context):
            keys = [decode_key(key) for key in request.keys]
            await asyncio.wrap_future(self._driver.call(lambda engine, now: (None, engine.offer_migration(keys, now))))
        return worker_pb2.OfferMigrationReply()

    async def Release(self, request: worker_pb2.ReleaseRequest, context: _Context) -> worker_pb2.ReleaseReply:
        async with _abort_on_error(context):
            key = decode_handoff_key(request.key)
            await asyncio.wrap_future(self._driver.call(lambda engine, now: (None, engine.revoke_lease(key, now))))
        return worker_pb2.ReleaseReply()

    # ---- streams; coroutines that write, so that a cancel ends them at once

    async def Watch(self, request: worker_pb2.WatchRequest, context: _Context) -> None:  # type: ignore[override]
        async with _abort_on_error(context):
            positions = {decode_key(position.key): position.next_index for position in request.positions}
        if not request.gateway:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a watch names no gateway")
        watch, unlisted = self._gateways.attach(GatewayId(request.gateway), positions, self._clock.now())
        # The stream reports listed jobs that are not here as failed. One that is still on its way must not start then.
        self.cancel([*unlisted, *(key for key in positions if key not in watch.box)])
        try:
            await self._stream_updates(watch, context)
        finally:
            self._gateways.detach(watch, self._clock.now())

    async def StreamHandoff(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[kv_pb2.StreamHandoffRequest],
        context: _Context,
    ) -> None:
        async with _abort_on_error(context):
            await self._handoffs.serve(request_iterator, context)

    # ---- the worker itself

    async def Describe(self, request: worker_pb2.DescribeRequest, context: _Context) -> worker_pb2.DescribeReply:
        """Return the description, the engine statistics, the link reports and the load of this worker.

        Statistics are left out when the engine has not answered after `BOOKS_S` seconds because a step is running. A
        caller that opens a stream to this worker calls Describe first and must not wait for a long step.
        """
        metadata = context.invocation_metadata()
        reply = self._descriptor.describe(with_bundle=request.with_bundle, metadata=metadata)
        try:
            async with asyncio.timeout(BOOKS_S):
                books = await asyncio.wrap_future(self._driver.call(lambda engine, now: (engine.books(), [])))
            reply.books.CopyFrom(encode_books(books))
        except (TimeoutError, TandemError):
            pass
        reply.links.extend(map(encode_link, self._link_monitor.reports.since(0)))
        snapshot = self.snapshot
        reply.load.CopyFrom(encode_load(snapshot.load))
        if snapshot.step_cost is not None:
            reply.step_cost.CopyFrom(encode_step_cost(snapshot.step_cost))
        return reply

    async def ProbeLink(self, request: worker_pb2.ProbeLinkRequest, context: _Context) -> worker_pb2.ProbeLinkReply:
        """Measure the link over which this worker reads the memory of the worker `request.source`, and return the
        report, or a refusal where the link cannot be measured. A probe that has begun is finished even if the caller's
        connection ends."""
        reply = worker_pb2.ProbeLinkReply()
        try:
            report = await self._link_monitor.measure(decode_worker(request.source), request.num_bytes)
            reply.report.CopyFrom(encode_link(report))
        except TandemError as refusal:
            reply.refusal.CopyFrom(encode_refusal(refusal.kind, refusal.message))
        return reply

    async def Drain(self, request: worker_pb2.DrainRequest, context: _Context) -> worker_pb2.DrainReply:
        done = await self.drain(request.timeout_ms / 1e3)
        return worker_pb2.DrainReply(
            num_left=done.num_left,
            num_moved=done.num_migrated,
            num_given_back=done.num_requeued,
            is_undone=done.is_undone,
        )

    async def UndoDrain(self, request: worker_pb2.UndoDrainRequest, context: _Context) -> worker_pb2.UndoDrainReply:
        if self._is_stopping:
            reason = "the worker drains because it stops, which cannot be undone"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        # Before the engine is called: a drain that begins meanwhile comes after this one has ended.
        self._is_draining = False
        self._has_changed.set()
        async with _abort_on_error(context):
            await asyncio.wrap_future(self._driver.call(lambda engine, now: (None, engine.end_drain())))
        # Wake every stream, so that gateways without a job here learn of it at once.
        self._gateways.wake()
        _log.info("the worker accepts new jobs again: its drain was undone")
        return worker_pb2.UndoDrainReply()

    async def drain(self, timeout_s: float, *, is_final: bool = False) -> DrainResult:
        """Refuse new jobs, let running ones migrate or finish, and wait up to `timeout_s` seconds until no job and no
        lease (offer of KV to another worker) is left, or the drain is undone, which `is_final` forbids. Returns how
        many jobs and leases are left, how many sequences migrated or went back to gateways, and whether the drain was
        undone; all numbers are 0 where the engine has ended. Does not raise."""
        self._is_draining = True
        self._is_stopping |= is_final
        try:
            await asyncio.wrap_future(self._driver.call(lambda engine, now: (None, engine.start_drain(now))))
            # Wake every stream, so that gateways without a job here learn of the drain at once.
            self._gateways.wake()
            await self._until_empty(timeout_s)
            done = await asyncio.wrap_future(self._driver.call(lambda engine, now: (engine.drained(), [])))
        except TandemError:
            return DrainResult(0)
        if not self._is_draining:
            return replace(done, is_undone=True)
        _log.info(
            "the drain has ended: %d sequences moved to other workers, %d went back to gateways, %d are unfinished",
            done.num_migrated,
            done.num_requeued,
            done.num_left,
        )
        return done

    async def _until_empty(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.snapshot.num_live and self._is_draining:
                    self._has_changed.clear()
                    await self._has_changed.wait()

    def cancel(self, keys: Iterable[JobKey]) -> None:
        """Queue the cancellation of jobs and return without waiting for the engine; unknown jobs are ignored."""
        cancelled = list(keys)
        if cancelled:
            self._driver.post(lambda engine, now: _cancel(engine, cancelled, now))

    # ---- inside

    def _read_submission(self, request: worker_pb2.SubmitRequest) -> Submission:
        submission = decode_submission(request)
        me = self._identity.me
        if submission.incarnation != me.incarnation:
            raise TandemError(ErrorKind.WORKER_LOST, f"{me} has restarted: it is incarnation {me.incarnation} now")
        model = submission.job.request.model
        if model != self._identity.model:
            raise TandemError(ErrorKind.MODEL_NOT_FOUND, f"{me} serves {self._identity.model!r}, not {model!r}")
        return submission

    async def _accept(self, submission: Submission) -> None:
        """Submit a job to the engine. The outbox is registered first, because the first token may precede the reply."""
        job = submission.job
        is_new = self._gateways.register(submission.gateway, job.keys, len(job.output_tokens), self._clock.now())
        try:
            is_live = await asyncio.wrap_future(self._driver.call(_submit(job)))
            if is_new and not is_live:
                raise TandemError(ErrorKind.WORKER_LOST, f"job {job.key} has ended, and its events were dropped")
        except BaseException as failure:
            if isinstance(failure, asyncio.CancelledError):
                # The caller has left and will not learn that the job was accepted.
                self.cancel(job.keys)
            if is_new:
                self._gateways.discard(job.keys)
            raise

    async def _stream_updates(self, watch: GatewayStream, context: _Context) -> None:
        """Send an update at once and whenever the stream is woken, with load, step cost and link reports that have
        changed."""
        last: EngineSnapshot | None = None
        links, last_number = self._link_monitor.reports, 0
        try:
            async with IdleTimeout(max(self._gateways.grace_s, READ_S)) as patience:
                while not watch.is_over:
                    watch.wake.clear()
                    snapshot = self.snapshot
                    # Compared by number: a gateway may have received a load in between, with the reply to Submit.
                    is_new_load = last is None or snapshot.load.number != last.load.number
                    is_new_cost = last is None or snapshot.step_cost != last.step_cost
                    update = encode_update(
                        watch.box.take(self._clock.now()),
                        snapshot.load if is_new_load else None,
                        snapshot.step_cost if is_new_cost else None,
                    )
                    if links.number > last_number:
                        update.links.extend(map(encode_link, links.since(last_number)))
                    last, last_number = snapshot, links.number
                    patience.wait()
                    await context.write(update)
                    patience.rest()
                    if watch.box.has_more:
                        continue
                    if watch.is_closing and not watch.wake.is_set():
                        return
                    await watch.wake.wait()
        except TimeoutError:
            return


@contextlib.asynccontextmanager
async def _abort_on_error(context: _Context) -> AsyncIterator[None]:
    """Run the block of an `async with`, and if it raises TandemError, end the gRPC call of `context` with the status
    code of the error's kind and its message. Other exceptions pass through."""
    try:
        yield
    except TandemError as error:
        await context.abort(grpc.StatusCode[error.kind.grpc], error.message)


def _submit(job: Job) -> Callable[[Engine, float], tuple[bool, list[Effect]]]:
    """Return a command that submits the job and returns whether it is live; a repeated job may have ended already."""

    def submit(engine: Engine, now: float) -> tuple[bool, list[Effect]]:
        effects = engine.submit(job, now)
        return not set(job.keys).isdisjoint(engine.live_jobs()), effects

    return submit


def _cancel(engine: Engine, keys: Iterable[JobKey], now: float) -> list[Effect]:
    return [effect for key in keys for effect in engine.cancel(key, now)]
