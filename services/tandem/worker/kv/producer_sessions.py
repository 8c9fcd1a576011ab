"""All links to the workers that this one takes KV from, one per source; never decides whether a pull goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tandem.core.ids import HandoffKey, WorkerRef
from tandem.kv.handoff import RemotePrefixRequest
from tandem.worker.kv.producer_session import ProducerSession, SessionContext

_log = logging.getLogger(__name__)


class ProducerSessions:
    """The engine's `Sources`. Links come with their first hand-off and go when they have been idle for a while.

    All calls on the event loop.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._links: dict[WorkerRef, ProducerSession] = {}
        self._tasks: dict[WorkerRef, asyncio.Task[None]] = {}
        self._is_open = True

    def __repr__(self) -> str:
        return f"<links {list(self._links.values())}>"

    def __len__(self) -> int:
        return len(self._links)

    @property
    def sources(self) -> frozenset[WorkerRef]:
        return frozenset(self._links)

    def follow(self, source: WorkerRef, key: HandoffKey, prefix_request: RemotePrefixRequest | None) -> None:
        self._tell(source, lambda link: link.follow(key, prefix_request))

    def take(self, source: WorkerRef, key: HandoffKey, num_output_tokens: int) -> None:
        self._tell(source, lambda link: link.take(key, num_output_tokens))

    def release(self, source: WorkerRef, key: HandoffKey, *, is_taken: bool) -> None:
        self._tell(source, lambda link: link.release(key, is_taken=is_taken))

    def renew(self, source: WorkerRef, keys: tuple[HandoffKey, ...]) -> None:
        if source in self._links:
            self._links[source].renew(keys)

    def peer_lost(self, source: WorkerRef) -> None:
        """The transport has lost a source: it must be connected anew before anything can be read."""
        if source in self._links:
            self._links[source].reconnect()

    async def close(self) -> None:
        """End all links; what their sources hold for us lapses by itself."""
        self._is_open = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self, source: WorkerRef, say: Callable[[ProducerSession], None]) -> None:
        if not self._is_open:
            return
        link = self._links.get(source)
        if link is not None:
            say(link)
            return
        link = self._links[source] = ProducerSession(source, self._context)
        say(link)
        self._tasks[source] = asyncio.create_task(self._run(link), name=f"link to {source}")

    async def _run(self, link: ProducerSession) -> None:
        try:
            await link.run()
        except Exception as defect:
            _log.exception("%r failed", link)
            source, reason = link.source, f"{type(defect).__name__}: {defect}"
            self._context.post(lambda engine, now: engine.source_lost(source, reason, now))
        finally:
            del self._links[link.source], self._tasks[link.source]
