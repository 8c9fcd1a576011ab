"""What happens when, in virtual time: a heap of events in one total order, and a digest of those that ran; never reads
a clock."""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[], None]


@dataclass(eq=False, slots=True)
class Event:
    """`label` says what happens, and is what the digest covers. Without an action it is cancelled or over."""

    label: str
    action: Action | None


class Agenda:
    """Runs one event after another: the earliest, and of those at one time the one that was asked for first. What an
    event asks for at its own time runs after all that had been asked for at that time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        self._heap: list[tuple[float, int, Event]] = []
        self._num_asked = 0
        self._log = hashlib.blake2b(digest_size=16)

    def at(self, time: float, label: str, action: Action) -> Event:
        """Ask for an event. Raises ValueError when its time has passed or is no time."""
        if not time >= self.now:
            raise ValueError(f"{label} at {time}, but it is {self.now} already")
        event = Event(label, action)
        heapq.heappush(self._heap, (time, self._num_asked, event))
        self._num_asked += 1
        return event

    def after(self, seconds: float, label: str, action: Action) -> Event:
        return self.at(self.now + seconds, label, action)

    def cancel(self, event: Event) -> None:
        """It will not happen, and leaves no trace in the digest; nothing when it has happened."""
        event.action = None

    def run(self, until: float = float("inf")) -> None:
        """Run every event up to and including `until`, or until none is left."""
        while self._heap and self._heap[0][0] <= until:
            time, _, event = heapq.heappop(self._heap)
            if event.action is None:
                continue
            action, event.action = event.action, None
            self.now = time
            self.num_run += 1
            self._log.update(struct.pack("<d", time) + event.label.encode() + b"\n")
            action()

    @property
    def num_asked(self) -> int:
        """Events that are still to happen."""
        return sum(1 for _, _, event in self._heap if event.action is not None)

    @property
    def digest(self) -> str:
        """Of the time and label of every event that ran, in order. Equal runs have equal ones."""
        return self._log.hexdigest()

    def __repr__(self) -> str:
        return f"<agenda {self.now:.6f} s, {self.num_run} run, {self.num_asked} to come>"
