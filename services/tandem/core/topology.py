"""Where a worker stands, as its operator labels it, and how far two of them are apart; never measures a link."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Distance(IntEnum):
    """The less is the nearer."""

    HOST = 0
    RACK = 1
    ZONE = 2
    FAR = 3


@dataclass(frozen=True, slots=True)
class Topology:
    """Labels, empty where nobody set them; what has no label is near nothing by it."""

    host: str = ""
    rack: str = ""
    zone: str = ""

    def distance(self, other: Topology) -> Distance:
        """Of the narrowest label that both have alike."""
        if self.host and self.host == other.host:
            return Distance.HOST
        if self.rack and self.rack == other.rack:
            return Distance.RACK
        if self.zone and self.zone == other.zone:
            return Distance.ZONE
        return Distance.FAR


UNLABELLED = Topology()
