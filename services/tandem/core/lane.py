"""Define the priority lanes of requests."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Lane(IntEnum):
    """Priority class of a request. At gateway and worker, all requests of a lane with a lower number are served before
    requests of lanes with higher numbers."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """Return the lower-case name, which clients, files and metrics use."""
        return self.name.lower()


ALL_LANES = frozenset(Lane)


def parse_lanes(text: str) -> frozenset[Lane]:
    """Parse labels of lanes that are separated by commas, such as `standard,batch`; an empty text means all lanes.

    Raises ValueError for an unknown label.
    """
    return lanes_of(label.strip() for label in text.split(",")) if text else ALL_LANES


def lanes_of(labels: Iterable[str]) -> frozenset[Lane]:
    """Return the lanes with these labels; all lanes where there are none. Raises ValueError for an unknown label."""
    by_label = {lane.label: lane for lane in Lane}
    found = list(labels)
    unknown = [label for label in found if label not in by_label]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a lane: use {', '.join(by_label)}")
    return frozenset(by_label[label] for label in found) or ALL_LANES


def lane_labels(lanes: frozenset[Lane]) -> tuple[str, ...]:
    """Return the labels of `lanes`, the most urgent first. If `lanes` has every lane, the result is empty, which is how
    the setting worker.lanes means all lanes."""
    return () if lanes == ALL_LANES else tuple(lane.label for lane in sorted(lanes))
