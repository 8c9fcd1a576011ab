"""What happens when, in virtual time: a heap of events in one total order; never reads a clock.

Events at one time happen by kind, then by who asked for them, then in the order in which they were asked for. So the
order is one of the simulated world: it does not depend on how early somebody asked, which is what lets a worker look
ahead over many steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tandem.sim.kernel.event_digest import EventDigest

Action = Callable[[], None]


@dataclass(eq=False, slots=True)
class Actor:
    """Who asks for events and where they happen; of lower `rank` first at one time. `stands` takes what would have
    happened here while the party stands still, and keeps nothing of it when the party is gone; None: it runs."""

    rank: int
    log: EventDigest
    stands: deque[SimEvent] | None = None

    def vanish(self) -> None:
        """Nothing happens here any more."""
        self.stands = deque(maxlen=0)

    @property
    def is_gone(self) -> bool:
        return self.stands is not None and self.stands.maxlen == 0


@dataclass(eq=False, slots=True)
class SimEvent:
    """Without an action it is cancelled or over. `label` is what the log of `to` keeps of it, if it is not empty."""

    label: str
    action: Action | None
    to: Actor


class SimEventQueue:
    """Runs one event after another. What an event asks for at its own time runs after it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        self._heap: list[tuple[float, bool, int, int, SimEvent]] = []
        self._num_asked = 0
        self._reached = -1

    def at(
        self, time: float, label: str, action: Action, *, by: Actor, to: Actor | None = None, is_end: bool = False
    ) -> SimEvent:
        """Ask for an event at `to`, or at oneself. The ends of what takes time come before all else at their time.
        Raises ValueError when the time has passed or is no time."""
        if not time >= self.now:
            raise ValueError(f"{label} at {time}, but it is {self.now} already")
        event = SimEvent(label, action, by if to is None else to)
        heapq.heappush(self._heap, (time, not is_end, by.rank, self._num_asked, event))
        self._num_asked += 1
        return event

    def after(self, seconds: float, label: str, action: Action, *, by: Actor, to: Actor | None = None) -> SimEvent:
        return self.at(self.now + seconds, label, action, by=by, to=to)

    def cancel(self, event: SimEvent) -> None:
        """It will not happen, and leaves no trace in a log; nothing when it has happened."""
        event.action = None

    def halt(self, party: Actor) -> None:
        """What happens at a party from now on waits until it goes on."""
        party.stands = deque()

    def go_on(self, party: Actor) -> None:
        """All that has waited happens now, in its order; nothing at a party that runs or is gone."""
        if party.stands is None or party.is_gone:
            return
        held, party.stands = party.stands, None
        for event in held:
            heapq.heappush(self._heap, (self.now, True, party.rank, self._num_asked, event))
            self._num_asked += 1

    def has_passed(self, time: float, by: Actor) -> bool:
        """Whether an event that `by` had asked for at `time` would have happened by now. Of several that one asks for
        at one time, the first is meant."""
        return time < self.now or (time == self.now and by.rank <= self._reached)

    def run(self, until: float = float("inf")) -> None:
        """Run every event up to and including `until`, or until none is left."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            time, is_later, rank, _, event = heapq.heappop(heap)
            action = event.action
            if action is None:
                continue
            if time > self.now:
                self._reached = -1
                self.now = time
            if event.to.stands is not None:
                event.to.stands.append(event)
                continue
            event.action = None
            if is_later and rank > self._reached:
                self._reached = rank
            self.num_run += 1
            if event.label:
                event.to.log.note(time, event.label)
            action()

    @property
    def num_asked(self) -> int:
        """Events that are still to happen."""
        return sum(1 for *_, event in self._heap if event.action is not None)

    def __repr__(self) -> str:
        return f"<agenda {self.now:.6f} s, {self.num_run} run, {self.num_asked} to come>"
