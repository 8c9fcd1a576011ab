"""Remember jobs that were rejected for lack of room and are submitted again, so that small jobs do not overtake large
ones.

A sequence that ends frees room for one other. A job that needs the room of several at once would find none while
smaller jobs take whatever becomes free, above all where these come through other gateways, which do not know about the
waiting job. Therefore the capacity that it lacks is kept from smaller jobs for as long as it is submitted again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tandem.core.ids import RequestId
from tandem.core.request import Job

PATIENCE_S = 0.5
"""Seconds within which a rejected job must be submitted again to keep its position."""

_Name = tuple[RequestId, int]


class Capacity(NamedTuple):
    """KV blocks and sequence seats of a worker."""

    num_blocks: int
    num_seats: int


class _RejectedJob(NamedTuple):
    """What a job lacked, and when it was rejected last."""

    lacks: Capacity
    rejected_at: float


class RejectedJobs:
    """Own the rejected jobs, in the order in which each was first rejected. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._jobs: dict[_Name, _RejectedJob] = {}

    def put(self, job: Job, lacks: Capacity, now: float) -> None:
        """Record the rejection of a job. `lacks` is its full need of each resource that was short, 0 of the other."""
        self._jobs[_name(job)] = _RejectedJob(lacks, now)

    def remove(self, job: Job) -> None:
        """Forget a job that was accepted, in this attempt or another."""
        self._jobs.pop(_name(job), None)

    def ahead(self, job: Job, need: Capacity, now: float) -> Capacity:
        """Return the capacity that is kept from a job: what larger jobs lacked that were rejected before it."""
        self._jobs = {
            name: rejected for name, rejected in self._jobs.items() if now - rejected.rejected_at < PATIENCE_S
        }
        before = list(self._before(job))
        return Capacity(
            sum(lacks.num_blocks for lacks in before if lacks.num_blocks > need.num_blocks),
            sum(lacks.num_seats for lacks in before if lacks.num_seats > need.num_seats),
        )

    def __repr__(self) -> str:
        return f"<{len(self._jobs)} rejected jobs>"

    def _before(self, job: Job) -> Iterator[Capacity]:
        mine = _name(job)
        for name, rejected in self._jobs.items():
            if name == mine:
                return
            yield rejected.lacks


def _name(job: Job) -> _Name:
    return job.request.id, job.choice
