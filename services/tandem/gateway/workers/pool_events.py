"""Define the events of `WorkerPool.events`, as frozen values."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.events import JobEvent
from tandem.core.ids import JobKey, WorkerRef
from tandem.routing.worker_view import Pair, WorkerView


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """Report the events of this gateway's jobs that one update of a worker contained.

    `freed`: the worker's view (what routing sees of it) where it may now accept a prompt that it would have rejected
    before, otherwise None."""

    worker: WorkerRef
    events: Sequence[JobEvent]
    freed: WorkerView | None


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Report that a worker is gone, and with it all jobs that ran on it; `reason` is text for logs."""

    worker: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class PositionsRequested:
    """Ask the reader of `WorkerPool.events` how far it has received the output of this gateway's jobs on a worker.

    The pool sends the event before it opens the worker's Watch stream. After the reader has applied all earlier events,
    it sets `reply` to the jobs whose tokens it expects from the worker, each with the index of its next token. The
    worker resends events from these positions on.
    """

    worker: WorkerRef
    reply: asyncio.Future[list[tuple[JobKey, int]]]


@dataclass(frozen=True, slots=True)
class ProbeDue:
    """Ask the request driver to test a pair of workers (prefill, decode): one KV block of `model` must move between
    them.

    The driver passes the test to `WorkerPool.record_probe`, which records the result.
    """

    pair: Pair
    model: str


@dataclass(frozen=True, slots=True)
class PlacementsChanged:
    """Report that queued requests may have placements that they did not have before, because workers or links have
    changed."""


PoolEvent = WorkerReported | WorkerLost | PositionsRequested | ProbeDue | PlacementsChanged
