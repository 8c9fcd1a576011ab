"""Who was turned away for lack of room and asks again: the large come before smaller ones that came later; never takes
anybody on.

A sequence that ends leaves room for one. So what needs the room of several at once would never find it beside others
that need less and take whatever there is, least of all where these come through other gateways, which do not know who
waits. Therefore the room that it lacks is kept from smaller ones for as long as it keeps asking.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tandem.core.ids import RequestId
from tandem.core.request import Job

PATIENCE_S = 0.5
"""Who still wants room asks again within so long."""

_Name = tuple[RequestId, int]


class Capacity(NamedTuple):
    """`num_blocks` and `num_seats` of a worker."""

    num_blocks: int
    num_seats: int


class _RejectedJob(NamedTuple):
    lacks: Capacity
    asked_at: float


class RejectedJobs:
    """In the order in which each was turned away first. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._askers: dict[_Name, _RejectedJob] = {}

    def put(self, job: Job, lacks: Capacity, now: float) -> None:
        """A job was turned away; `lacks`: all that it needs of what there was too little of, 0 of the other."""
        self._askers[_name(job)] = _RejectedJob(lacks, now)

    def remove(self, job: Job) -> None:
        """It was taken on, in this attempt or another."""
        self._askers.pop(_name(job), None)

    def ahead(self, job: Job, need: Capacity, now: float) -> Capacity:
        """What is kept from a job: the room of larger ones that were turned away before it."""
        self._askers = {name: asker for name, asker in self._askers.items() if now - asker.asked_at < PATIENCE_S}
        before = list(self._before(job))
        return Capacity(
            sum(lacks.num_blocks for lacks in before if lacks.num_blocks > need.num_blocks),
            sum(lacks.num_seats for lacks in before if lacks.num_seats > need.num_seats),
        )

    def __repr__(self) -> str:
        return f"<{len(self._askers)} turned away>"

    def _before(self, job: Job) -> Iterator[Capacity]:
        mine = _name(job)
        for name, asker in self._askers.items():
            if name == mine:
                return
            yield asker.lacks


def _name(job: Job) -> _Name:
    return job.request.id, job.choice
