"""Count how much KV has moved between which workers, as reported to this gateway.

Counts only grow: a reader derives a rate from two readings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Literal, NamedTuple

from tandem.core.ids import WorkerId

Kind = Literal["handoff", "prefix"]
MAX_FLOWS = 1024
"""Largest number of flows to keep; beyond it the flow without traffic for the longest time is dropped."""


class Flow(NamedTuple):
    """KV that moved from worker `source` to worker `target` since this gateway started.

    `kind`: "handoff" for the KV of requests that their decode worker pulled, "prefix" for remote prefix fetches.
    `num_transfers`: the number of pulls or fetches, which moved `num_bytes` in total.
    """

    source: WorkerId
    target: WorkerId
    kind: Kind
    num_transfers: int
    num_bytes: int


class Flows:
    """Count the KV that moved between pairs of workers, for at most `MAX_FLOWS` pairs, ordered by their latest
    traffic."""

    def __init__(self) -> None:
        self._found: dict[tuple[WorkerId, WorkerId, Kind], Flow] = {}

    def moved(self, source: WorkerId, target: WorkerId, kind: Kind, num_bytes: int) -> None:
        """Count one pull or fetch of `num_bytes` bytes."""
        key = (source, target, kind)
        known = self._found.pop(key, None) or Flow(source, target, kind, 0, 0)
        self._found[key] = Flow(source, target, kind, known.num_transfers + 1, known.num_bytes + num_bytes)
        if len(self._found) > MAX_FLOWS:
            del self._found[next(iter(self._found))]

    def latest(self, count: int) -> Iterator[Flow]:
        """Iterate over at most `count` flows, the one with the latest traffic first."""
        return islice(reversed(self._found.values()), count)
