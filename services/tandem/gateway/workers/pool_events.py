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
    """A worker has sent one update: events of its jobs, and its view in `freed` where it may have room that it did not
    have before."""

    worker: WorkerRef
    events: Sequence[JobEvent]
    freed: WorkerView | None


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone with all jobs that ran on it."""

    worker: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class PositionsRequested:
    """A stream is about to be opened. `reply` is to be set to the jobs that the gateway waits for on this worker, each
    with the index of its next token, after all earlier events were applied."""

    worker: WorkerRef
    reply: asyncio.Future[list[tuple[JobKey, int]]]


@dataclass(frozen=True, slots=True)
class ProbeDue:
    """A pair of workers is to move a test block of a model; `WorkerPool.record_probe` takes the result."""

    pair: Pair
    model: str


@dataclass(frozen=True, slots=True)
class PlacementsChanged:
    """Queued requests may have placements that they did not have before."""


PoolEvent = WorkerReported | WorkerLost | PositionsRequested | ProbeDue | PlacementsChanged
