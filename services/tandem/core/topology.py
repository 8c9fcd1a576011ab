"""Define the location labels of a worker and the distance between two locations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Distance(IntEnum):
    """Distance between two workers; smaller is nearer."""

    HOST = 0
    RACK = 1
    ZONE = 2
    FAR = 3


@dataclass(frozen=True, slots=True)
class Topology:
    """Location labels set by the operator; an empty label matches nothing."""

    host: str = ""
    rack: str = ""
    zone: str = ""

    def distance(self, other: Topology) -> Distance:
        """Return the distance to another location, by the narrowest label that both share; FAR where they share
        none."""
        if self.host and self.host == other.host:
            return Distance.HOST
        if self.rack and self.rack == other.rack:
            return Distance.RACK
        if self.zone and self.zone == other.zone:
            return Distance.ZONE
        return Distance.FAR


UNLABELLED = Topology()
