"""Define the location labels of a worker and the distance between two locations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Distance(IntEnum):
    """Distance between two workers, by what they share: a machine, a rack, a zone or nothing. Smaller is nearer."""

    HOST = 0
    RACK = 1
    ZONE = 2
    FAR = 3


@dataclass(frozen=True, slots=True)
class Topology:
    """Location of a worker, as labels that the operator sets: machine, rack and zone; an empty label equals no other
    label.
    """

    host: str = ""
    rack: str = ""
    zone: str = ""

    def distance(self, other: Topology) -> Distance:
        """Return the distance to another location, by the narrowest label that both share (machine, rack, zone); FAR if
        none.
        """
        if self.host and self.host == other.host:
            return Distance.HOST
        if self.rack and self.rack == other.rack:
            return Distance.RACK
        if self.zone and self.zone == other.zone:
            return Distance.ZONE
        return Distance.FAR


UNLABELLED = Topology()
