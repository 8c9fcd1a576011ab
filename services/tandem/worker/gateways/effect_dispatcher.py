"""Deliver the engine's effects to the components that carry them out, across threads.

Reads are started on the engine's thread itself; everything else crosses to the event loop, one call per batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.core.events import JobEvent, KVFact
from tandem.core.ids import HandoffKey, WorkerRef
from tandem.engine.effects import (
    Effect,
    FollowHandoff,
    JobEnded,
    ReleaseHandoff,
    RenewLeases,
    SendAnnouncement,
    SendEvent,
    SendHandoffEnded,
    SendRemainderRequest,
    StartRead,
    TearDownProducer,
)
from tandem.engine.job_timeline import JobTimes
from tandem.kv.handoff import RemotePrefixRequest
from tandem.worker.engine.driver import EngineSnapshot
from tandem.worker.gateways.watch_sessions import WatchSessions
from tandem.worker.kv.consumer_streams import ConsumerStreams
from tandem.worker.kv.transfer_client import TransferClient

_log = logging.getLogger(__name__)


class Sources(Protocol):
    """Interface to the streams to the workers from which this worker takes KV. Called on the event loop."""

    def follow(self, source: WorkerRef, key: HandoffKey, prefix_request: RemotePrefixRequest | None) -> None: ...
    def take(self, source: WorkerRef, key: HandoffKey, num_output_tokens: int) -> None: ...
    def release(self, source: WorkerRef, key: HandoffKey, *, is_taken: bool) -> None: ...
    def renew(self, source: WorkerRef, keys: tuple[HandoffKey, ...]) -> None: ...


def _ignore_times(times: JobTimes) -> None:
    """Ignore the times of a job."""


class EffectDispatcher:
    """An `EffectSink`. `snapshot` is the newest one that the event loop has seen; `changed` is set with each.

    `on_moving` is called on the engine's thread when KV starts or stops being offered or read, and `on_facts` there
    with events of cached blocks. `on_ended` is called once on the event loop, with an error or None.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        gateways: WatchSessions,
        consumers: ConsumerStreams,
        reads: TransferClient,
        on_moving: Callable[[bool], None],
        on_ended: Callable[[str | None], None],
        on_facts: Callable[[Sequence[KVFact]], None],
    ) -> None:
        self._loop = loop
        self._gateways = gateways
        self._consumers = consumers
        self._reads = reads
        self._on_moving = on_moving
        self._on_ended = on_ended
        self._on_facts = on_facts
        self._sources: Sources | None = None
        self._job_ended: Callable[[JobTimes], None] = _ignore_times
        self._was_moving = False
        self.snapshot = EngineSnapshot()
        self.changed = asyncio.Event()

    def attach(self, sources: Sources, job_ended: Callable[[JobTimes], None] | None = None) -> None:
        """Set the receivers of stream effects and of job times; before the engine starts."""
        self._sources = sources
        self._job_ended = job_ended or _ignore_times

    # ---- on the engine's thread

    def dispatch(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        if snapshot.is_transferring != self._was_moving:
            self._was_moving = snapshot.is_transferring
            self._on_moving(snapshot.is_transferring)
        others: list[Effect] = []
        for effect in effects:
            if isinstance(effect, StartRead):
                self._reads.start_read(effect)
            elif isinstance(effect, TearDownProducer):
                self._reads.tear_down(effect)
            else:
                others.append(effect)
        self._call_on_loop(lambda: self._arrive(others, snapshot))

    def on_kv_events(self, facts: Sequence[KVFact]) -> None:
        self._on_facts(facts)

    def ended(self, error: str | None) -> None:
        self._call_on_loop(lambda: self._on_ended(error))

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The event loop is closed.
            return

    # ---- on the event loop

    def _arrive(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        """Carry out a batch on the event loop. A failure means that gateways and engine disagree, so the worker is
        ended."""
        try:
            self._carry_out(effects, snapshot)
        except Exception as failure:
            _log.exception("effects cannot be carried out")
            self._on_ended(f"{type(failure).__name__}: {failure}")
        self.snapshot = snapshot
        self.changed.set()

    def _carry_out(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        assert self._sources is not None, "no sources were attached"
        events: list[JobEvent] = []
        for effect in effects:
            match effect:
                case SendEvent(event):
                    events.append(event)
                case SendAnnouncement() | SendHandoffEnded():
                    self._consumers.send(effect)
                case FollowHandoff(source, key, prefix_request):
                    self._sources.follow(source, key, prefix_request)
                case SendRemainderRequest(source, key, num_output_tokens):
                    self._sources.take(source, key, num_output_tokens)
                case ReleaseHandoff(source, key, is_taken):
                    self._sources.release(source, key, is_taken=is_taken)
                case RenewLeases(source, keys):
                    self._sources.renew(source, keys)
                case JobEnded(times):
                    self._job_ended(times)
                case _:
                    raise AssertionError(f"{effect} is carried out on the engine's thread")
        self._gateways.deliver(events)
