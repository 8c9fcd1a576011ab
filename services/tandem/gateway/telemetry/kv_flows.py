"""How much KV has moved between which workers, as this gateway was told; never says how fast, because who looks twice
knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from tandem.core.ids import WorkerId

Kind = Literal["handoff", "prefix"]
MAX_FLOWS = 1024
"""Of more, the one that has been still for longest is forgotten."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Since this gateway began. A handoff is a request's KV on its way to whoever decodes it, a prefix is lent."""

    source: WorkerId
    target: WorkerId
    kind: Kind
    num_moves: int
    num_bytes: int


class Flows:
    """In the order in which they moved last."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[tuple[WorkerId, WorkerId, Kind], Flow] = {}

    def moved(self, source: WorkerId, target: WorkerId, kind: Kind, num_bytes: int) -> None:
        key = (source, target, kind)
        known = self._found.pop(key, None) or Flow(source, target, kind, 0, 0)
        self._found[key] = Flow(source, target, kind, known.num_moves + 1, known.num_bytes + num_bytes)
        if len(self._found) > MAX_FLOWS:
            del self._found[next(iter(self._found))]

    def latest(self, count: int) -> Iterator[Flow]:
        """At most so many, the one that moved last first."""
        return islice(reversed(self._found.values()), count)

    def __repr__(self) -> str:
        return f"<flows between {len(self._found)} pairs>"
