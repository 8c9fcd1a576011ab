"""Run the consumer's end of StreamHandoff with one source: connect, follow hand-offs, renew and release leases.

A connection attempt verifies the source, makes it readable, opens the stream, and follows every active hand-off. When a
connection breaks, another attempt follows as long as a hand-off is active; leases that the source has given may expire
meanwhile. A source whose process has ended is reported as lost at the first attempt. A source that cannot be reached
for as long as a lease lasts is reported as lost too, because its offers have expired by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.core.ids import HandoffKey, WorkerRef
from tandem.engine.effects import Effect, FollowHandoff, ReleaseHandoff, RenewLeases, SendRemainderRequest
from tandem.engine.engine import Engine
from tandem.kv.handoff import MAX_REMOTE_PREFIX_BLOCKS, RemotePrefixRequest
from tandem.transfer.interface import PeerError
from tandem.wire.gen import kv_pb2
from tandem.wire.kv_codec import (
    decode_announcement,
    decode_handoff_key,
    encode_handoff_key,
    encode_prefix_request,
    encode_pull_remainder,
    encode_worker,
)
from tandem.wire.peer_auth import PeerAuth, reason_of
from tandem.wire.worker_codec import decode_kind
from tandem.worker.engine.driver import Command
from tandem.worker.kv.handshake import ANSWER_S, SourceGone, open_source
from tandem.worker.kv.transfer_client import TransferClient
from tandem.worker.model.worker_info import WorkerInfo

NUM_FIRST_TRIES = 4
"""Attempts to reach a source that was never connected before it counts as lost."""
BACKOFF_S = 0.05
"""First delay in seconds after a failure; doubles each time."""
MAX_BACKOFF_S = 1.0
"""Upper bound, in seconds, of the delay that begins with `BACKOFF_S`."""
IDLE_S = 60.0
"""Seconds without an active hand-off after which a session ends."""

_log = logging.getLogger(__name__)


SourceEffect = FollowHandoff | RenewLeases | SendRemainderRequest | ReleaseHandoff
"""Effects of the engine that a session carries out."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Hold what all sessions of a worker with its sources share.

    `me`: this worker. `trust`: authentication within the cluster. `clock`: the clock that the engine uses too. `post`:
    queues a command for the engine's thread. `transfer`: connects sources for reads. `lease_s`: seconds that a lease
    lasts without renewal.
    """

    me: WorkerInfo
    trust: PeerAuth
    clock: Clock
    post: Callable[[Command], None]
    transfer: TransferClient
    lease_s: float


class _Broken(Exception):
    """Raised when a connection ends that should have continued."""


_FAILURES = (grpc.aio.AioRpcError, PeerError, TandemError, TimeoutError, asyncio.InvalidStateError, _Broken)
"""Errors of a connection that may be tried again. InvalidStateError: a write to a call that has just ended."""

_Call = grpc.aio.StreamStreamCall[kv_pb2.StreamHandoffRequest, kv_pb2.StreamHandoffUpdate]


class ProducerSession:
    """Keep a StreamHandoff stream to one source, a producer that this worker reads from: send the engine's requests to
    the source, and pass the source's announcements and lease renewals to the engine. All calls must be on the event
    loop.

    `_active`: the hand-offs that are followed now, each with its request if it is a remote prefix fetch, else with
    None.
    """

    def __init__(self, source: WorkerRef, context: SessionContext) -> None:
        self.source = source
        self._context = context
        self._active: dict[HandoffKey, RemotePrefixRequest | None] = {}
        self._to_follow: dict[HandoffKey, RemotePrefixRequest | None] = {}
        self._to_renew: dict[HandoffKey, None] = {}
        self._to_take: dict[HandoffKey, int] = {}
        # Hand-offs to release; True where all offered blocks were read.
        self._to_release: dict[HandoffKey, bool] = {}
        self._wake = asyncio.Event()
        self._is_lost = False
        self._was_connected = False
        self._num_failures = 0
        self._broke_at = 0.0
        self._sequence = 0
        self._unanswered: dict[int, tuple[float, tuple[HandoffKey, ...]]] = {}

    def __repr__(self) -> str:
        return f"<session with {self.source}, {len(self._active)} followed, {self._num_failures} failures in a row>"

    def carry_out(self, effect: SourceEffect) -> None:
        """Queue an effect of the engine, to be sent to this session's source with the next message. Returns without
        waiting."""
        match effect:
            case FollowHandoff(_, key, prefix_request):
                self._active[key] = prefix_request
                self._to_follow[key] = prefix_request
            case RenewLeases(_, keys):
                self._to_renew.update(dict.fromkeys(key for key in keys if key in self._active))
            case SendRemainderRequest(_, key, num_output_tokens):
                self._to_take[key] = num_output_tokens
            case ReleaseHandoff(_, key, is_taken):
                self._active.pop(key, None)
                self._to_follow.pop(key, None)
                self._to_renew.pop(key, None)
                self._to_take.pop(key, None)
                self._to_release[key] = is_taken
        self._wake.set()

    def reconnect(self) -> None:
        """End the current stream to `source`, because the transport has lost its connection to `source`, and return
        without waiting.

        `run` then opens a new stream, or ends the session where no hand-off is active.
        """
        self._is_lost = True
        self._wake.set()

    async def run(self) -> None:
        """Connect to the source and exchange messages until the session is not needed any more; connect again after
        failures.

        Returns when no hand-off was active for `IDLE_S` seconds, or when the connection breaks while none is active.
        Also returns when the source is gone, has not answered the first `NUM_FIRST_TRIES` attempts, or stays
        unreachable for as long as a lease lasts; the source is then reported to the engine as lost. There is no await
        between the last check for active hand-offs and the return, so that no request is lost.
        """
        while True:
            is_broken = True
            try:
                await self._connect_and_exchange()
                reason = "the stream ended"
                is_broken = False
            except SourceGone as gone:
                self._give_up(str(gone))
                return
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                reason = "the source cancelled the call"
            except _FAILURES as failure:
                reason = _reason(failure)
            if self._should_give_up():
                self._give_up(reason)
                return
            # A lease that cannot be released now expires by itself.
            self._to_release.clear()
            if not self._active:
                # The source is probably gone; if not, it is connected again when needed.
                if is_broken:
                    self._context.transfer.disconnect_when_idle(self.source)
                return
            _log.info("the handoff session with worker %s broke and is opened again: %s", self.source, reason)
            await self._pause(min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (self._num_failures - 1)))

    def _should_give_up(self) -> bool:
        """Count a failed attempt; returns whether the source counts as lost."""
        now = self._context.clock.now()
        self._broke_at = self._broke_at if self._num_failures else now
        self._num_failures += 1
        if not self._was_connected:
            return self._num_failures >= NUM_FIRST_TRIES
        return now - self._broke_at >= self._context.lease_s

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until there is a new request."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _connect_and_exchange(self) -> None:
        """Connect and exchange messages. Returns when the session is idle."""
        context = self._context
        async with open_source(context.trust, self.source, context.me) as source:
            self._is_lost = False
            async with asyncio.timeout(ANSWER_S):
                await asyncio.wrap_future(context.transfer.connect(source.peer))
            self._was_connected = True
            call: _Call = source.stub.StreamHandoff()  # type: ignore[call-arg]  # the stubs know only calls with an iterator
            try:
                await self._exchange(call)
            finally:
                call.cancel()

    async def _exchange(self, call: _Call) -> None:
        """Send and receive until the session is idle; raises when the stream ends otherwise."""
        self._unanswered.clear()
        tasks = [asyncio.create_task(self._send_requests(call)), asyncio.create_task(self._receive_updates(call))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                raise error

    # ---- to the source

    async def _send_requests(self, call: _Call) -> None:
        self._to_follow = dict(self._active)
        self._to_renew.clear()
        # The engine requests the remainder again once the source has repeated its announcements.
        self._to_take.clear()
        message = self._next_message()
        message.consumer.CopyFrom(encode_worker(self._context.me.me))
        message.fingerprint = self._context.me.fingerprint
        await call.write(message)
        while True:
            self._wake.clear()
            if self._is_lost:
                raise _Broken("the transport lost the source")
            if self._to_follow or self._to_renew or self._to_take or self._to_release:
                await call.write(self._next_message())
                continue
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._wake.wait()
            except TimeoutError:
                if not self._active:
                    return

    def _next_message(self) -> kv_pb2.StreamHandoffRequest:
        """Build a message of all pending requests that fit. The leases that it renews count from now."""
        self._sequence += 1
        follow = self._some_to_follow()
        self._unanswered[self._sequence] = (self._context.clock.now(), (*follow, *self._to_renew))
        message = kv_pb2.StreamHandoffRequest(
            follow=[encode_handoff_key(key) for key, prefix_request in follow.items() if prefix_request is None],
            prefix_request=[
                encode_prefix_request(key, prefix_request)
                for key, prefix_request in follow.items()
                if prefix_request is not None
            ],
            renew=map(encode_handoff_key, self._to_renew),
            take=[encode_pull_remainder(key, num_known) for key, num_known in self._to_take.items()],
            release=[encode_handoff_key(key) for key, is_taken in self._to_release.items() if not is_taken],
            taken=[encode_handoff_key(key) for key, is_taken in self._to_release.items() if is_taken],
            sequence=self._sequence,
        )
        self._to_renew.clear()
        self._to_take.clear()
        self._to_release.clear()
        return message

    def _some_to_follow(self) -> dict[HandoffKey, RemotePrefixRequest | None]:
        """Remove and return hand-offs to follow, in order, as long as the block hashes of their prefix requests fit one
        message."""
        taken: dict[HandoffKey, RemotePrefixRequest | None] = {}
        room = MAX_REMOTE_PREFIX_BLOCKS
        for key, prefix_request in list(self._to_follow.items()):
            room -= 0 if prefix_request is None else len(prefix_request.hashes)
            if room < 0:
                break
            taken[key] = self._to_follow.pop(key)
        return taken

    # ---- from the source

    async def _receive_updates(self, call: _Call) -> None:
        async for update in call:
            self._num_failures = 0
            self._context.post(self._commands(update))
        raise _Broken("the source ended the stream")

    def _commands(self, update: kv_pb2.StreamHandoffUpdate) -> Command:
        """Decode an update to one engine command. Raises TandemError when the update is malformed."""
        announced = [decode_announcement(message) for message in update.announcements]
        ended = [(decode_handoff_key(end.key), decode_kind(end.kind), end.message) for end in update.ended]
        granted = [self._unanswered.pop(s) for s in sorted(self._unanswered) if s <= update.renewed_sequence]
        lease_s = update.lease_ms / 1e3

        def apply(engine: Engine, now: float) -> list[Effect]:
            effects: list[Effect] = []
            for announcement in announced:
                effects += engine.announced(announcement, now)
            for key, kind, message in ended:
                effects += engine.handoff_ended(key, kind, message, now)
            for sent_at, keys in granted:
                engine.renewed(keys, sent_at, lease_s)
            return effects

        return apply

    def _give_up(self, reason: str) -> None:
        _log.warning("worker %s is lost as a source of KV: %s", self.source, reason)
        self.report_lost(reason)
        self._context.transfer.disconnect_when_idle(self.source)

    def report_lost(self, reason: str) -> None:
        """Report to the engine that the source is lost, so that its hand-offs fail."""
        source = self.source
        self._context.post(lambda engine, now: engine.source_lost(source, reason, now))


class ProducerSessions:
    """Own a session with each source: from the first hand-off of the source until no hand-off was active for some time.

    All calls must be on the event loop.
    """

    def __init__(self, context: SessionContext) -> None:
        self.context = context
        self._sessions: dict[WorkerRef, ProducerSession] = {}
        self._tasks: dict[WorkerRef, asyncio.Task[None]] = {}
        self._is_open = True

    def __repr__(self) -> str:
        return f"<producer sessions {list(self._sessions.values())}>"

    @property
    def sources(self) -> frozenset[WorkerRef]:
        return frozenset(self._sessions)

    def carry_out(self, effect: SourceEffect) -> None:
        """Pass an effect of the engine to the session with the source that the effect names; start a session if there
        is none.

        A lease renewal starts no session, and nothing is done after `close`.
        """
        source = effect.source
        session = self._sessions.get(source)
        if session is None:
            if not self._is_open or isinstance(effect, RenewLeases):
                return
            session = self._sessions[source] = ProducerSession(source, self.context)
            self._tasks[source] = asyncio.create_task(self._run(session), name=f"session with {source}")
        session.carry_out(effect)

    def peer_lost(self, source: WorkerRef) -> None:
        """Make the session with `source` connect again, because the transport has lost its connection to `source`.
        Until it has connected, nothing can be read from `source`. Does nothing if there is no session with `source`."""
        if source in self._sessions:
            self._sessions[source].reconnect()

    async def close(self) -> None:
        """End all sessions and wait until they have ended. Leases that sources have given to this worker are not
        released; they expire by themselves."""
        self._is_open = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, session: ProducerSession) -> None:
        try:
            await session.run()
        except Exception as defect:
            _log.exception("the handoff session with worker %s failed because of a defect", session.source)
            session.report_lost(f"{type(defect).__name__}: {defect}")
        finally:
            del self._sessions[session.source], self._tasks[session.source]


def _is_cancelled() -> bool:
    """Return whether this task itself was cancelled. CancelledError alone does not show that: a gRPC call that its
    server cancels raises it too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _reason(failure: Exception) -> str:
    if isinstance(failure, grpc.aio.AioRpcError):
        return reason_of(failure)
    return str(failure) or type(failure).__name__
