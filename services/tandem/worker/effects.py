"""Carries what the engine wants done to those who do it, across threads; never decides anything.

Reads are ordered on the engine's thread itself. All else crosses to the event loop, one call per batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.core.events import JobEvent, KVFact
from tandem.core.ids import HandoffKey, WorkerRef
from tandem.engine.effects import Announce, Effect, Emit, Ended, EndHandoff, Follow, Renew, Take, Unfollow
from tandem.engine.job_times import JobTimes
from tandem.kv.handoff import Borrow
from tandem.kv.pull_outcome import StartRead, Teardown
from tandem.worker.driver import Snapshot
from tandem.worker.gateways import Gateways
from tandem.worker.reads import ReadDesk
from tandem.worker.takers import Takers

_log = logging.getLogger(__name__)


class Sources(Protocol):
    """Whoever holds the streams to the workers that this one takes KV from. Called on the event loop."""

    def follow(self, source: WorkerRef, key: HandoffKey, borrow: Borrow | None) -> None: ...
    def take(self, source: WorkerRef, key: HandoffKey, num_output_tokens: int) -> None: ...
    def release(self, source: WorkerRef, key: HandoffKey, *, is_taken: bool) -> None: ...
    def renew(self, source: WorkerRef, keys: tuple[HandoffKey, ...]) -> None: ...


def _unheard(times: JobTimes) -> None:
    """Nobody counts jobs."""


class Router:
    """An `EffectSink`. `snapshot` is the newest one that the event loop has seen; `changed` is set with each.

    `on_moving` is called on the engine's thread when KV starts or stops being offered or read, `on_facts` there with
    what became of cached blocks; `on_ended` once on the event loop, with what went wrong, if anything did.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        gateways: Gateways,
        takers: Takers,
        reads: ReadDesk,
        on_moving: Callable[[bool], None],
        on_ended: Callable[[str | None], None],
        on_facts: Callable[[Sequence[KVFact]], None],
    ) -> None:
        self._loop = loop
        self._gateways = gateways
        self._takers = takers
        self._reads = reads
        self._on_moving = on_moving
        self._on_ended = on_ended
        self._on_facts = on_facts
        self._sources: Sources | None = None
        self._job_ended: Callable[[JobTimes], None] = _unheard
        self._was_moving = False
        self.snapshot = Snapshot()
        self.changed = asyncio.Event()

    def attach(self, sources: Sources, job_ended: Callable[[JobTimes], None] | None = None) -> None:
        """Where follows, renewals and releases go, and times of jobs; before the engine starts."""
        self._sources = sources
        self._job_ended = job_ended or _unheard

    # ---- on the engine's thread

    def dispatch(self, effects: Sequence[Effect], snapshot: Snapshot) -> None:
        if snapshot.is_moving != self._was_moving:
            self._was_moving = snapshot.is_moving
            self._on_moving(snapshot.is_moving)
        others: list[Effect] = []
        for effect in effects:
            if isinstance(effect, StartRead):
                self._reads.start_read(effect)
            elif isinstance(effect, Teardown):
                self._reads.tear_down(effect)
            else:
                others.append(effect)
        self._cross(lambda: self._arrive(others, snapshot))

    def told(self, facts: Sequence[KVFact]) -> None:
        self._on_facts(facts)

    def ended(self, error: str | None) -> None:
        self._cross(lambda: self._on_ended(error))

    def _cross(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop is closed: nobody is left to be told.
            return

    # ---- on the event loop

    def _arrive(self, effects: Sequence[Effect], snapshot: Snapshot) -> None:
        """A batch that cannot be carried out means that gateways and engine disagree, which nothing can mend."""
        try:
            self._carry_out(effects, snapshot)
        except Exception as failure:
            _log.exception("effects cannot be carried out")
            self._on_ended(f"{type(failure).__name__}: {failure}")
        self.snapshot = snapshot
        self.changed.set()

    def _carry_out(self, effects: Sequence[Effect], snapshot: Snapshot) -> None:
        assert self._sources is not None, "no sources were attached"
        events: list[JobEvent] = []
        for effect in effects:
            match effect:
                case Emit(event):
                    events.append(event)
                case Announce() | EndHandoff():
                    self._takers.tell(effect)
                case Follow(source, key, borrow):
                    self._sources.follow(source, key, borrow)
                case Take(source, key, num_output_tokens):
                    self._sources.take(source, key, num_output_tokens)
                case Unfollow(source, key, is_taken):
                    self._sources.release(source, key, is_taken=is_taken)
                case Renew(source, keys):
                    self._sources.renew(source, keys)
                case Ended(times):
                    self._job_ended(times)
                case _:
                    raise AssertionError(f"{effect} is carried out on the engine's thread")
        self._gateways.deliver(events)
