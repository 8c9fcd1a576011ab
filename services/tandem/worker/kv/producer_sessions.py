"""Own the sessions with the workers from which this worker takes KV, one per source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tandem.core.ids import HandoffKey, WorkerRef
from tandem.kv.handoff import RemotePrefixRequest
from tandem.worker.kv.producer_session import ProducerSession, SessionContext

_log = logging.getLogger(__name__)


class ProducerSessions:
    """The dispatcher's `Sources`: a session is created with the first hand-off of its source and ends after some idle
    time.

    All calls on the event loop.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._sessions: dict[WorkerRef, ProducerSession] = {}
        self._tasks: dict[WorkerRef, asyncio.Task[None]] = {}
        self._is_open = True

    def __repr__(self) -> str:
        return f"<producer sessions {list(self._sessions.values())}>"

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def sources(self) -> frozenset[WorkerRef]:
        return frozenset(self._sessions)

    def follow(self, source: WorkerRef, key: HandoffKey, prefix_request: RemotePrefixRequest | None) -> None:
        self._with_session(source, lambda session: session.follow(key, prefix_request))

    def take(self, source: WorkerRef, key: HandoffKey, num_output_tokens: int) -> None:
        self._with_session(source, lambda session: session.take(key, num_output_tokens))

    def release(self, source: WorkerRef, key: HandoffKey, *, is_taken: bool) -> None:
        self._with_session(source, lambda session: session.release(key, is_taken=is_taken))

    def renew(self, source: WorkerRef, keys: tuple[HandoffKey, ...]) -> None:
        if source in self._sessions:
            self._sessions[source].renew(keys)

    def peer_lost(self, source: WorkerRef) -> None:
        """Reconnect to a source that the transport has lost; nothing can be read from the source until then."""
        if source in self._sessions:
            self._sessions[source].reconnect()

    async def close(self) -> None:
        """End all sessions; leases that the sources hold for this worker expire."""
        self._is_open = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _with_session(self, source: WorkerRef, call: Callable[[ProducerSession], None]) -> None:
        if not self._is_open:
            return
        session = self._sessions.get(source)
        if session is not None:
            call(session)
            return
        session = ProducerSession(source, self._context)
        self._sessions[source] = session
        call(session)
        self._tasks[source] = asyncio.create_task(self._run(session), name=f"session with {source}")

    async def _run(self, session: ProducerSession) -> None:
        try:
            await session.run()
        except Exception as defect:
            _log.exception("%r failed", session)
            source, reason = session.source, f"{type(defect).__name__}: {defect}"
            self._context.post(lambda engine, now: engine.source_lost(source, reason, now))
        finally:
            del self._sessions[session.source], self._tasks[session.source]
