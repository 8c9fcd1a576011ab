"""Run the events of a simulation in virtual time, from a heap with one total order, and digest what happened.

Events at one time run by kind (ends of steps first), then by the rank of the actor that scheduled them, then in the
order in which they were scheduled. So the order does not depend on how early an actor schedules an event relative to
other actors, which lets a worker look ahead over many steps. No wall clock is read.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_TIME = struct.Struct("<d")
_STEP = struct.Struct("<dqqq")


class EventDigest:
    """Hash the events and the steps of one actor in two chains.

    There are two chains because a step may be recorded later than it ended (see `cluster.worker.Lookahead`). Each entry
    contains its time, so the two chains together determine which events happened between which steps. Entries are not
    kept.
    """

    def __init__(self) -> None:
        self._entries = hashlib.blake2b(digest_size=16)
        self._steps = hashlib.blake2b(digest_size=16)

    def note(self, time: float, label: str) -> None:
        """Add an event that arrived at the actor, or a decision of the actor, to the event chain."""
        self._entries.update(_TIME.pack(time) + label.encode() + b"\n")

    def note_bytes(self, raw: bytes) -> None:
        """Add details of the entry that was noted last."""
        self._entries.update(raw)

    def step(self, time: float, number: int, num_tokens: int, num_free_blocks: int) -> None:
        """Add a step that ended at `time`: its number, the tokens that it computed and the blocks free after it."""
        self._steps.update(_STEP.pack(time, number, num_tokens, num_free_blocks))

    def digest(self) -> bytes:
        return self._entries.digest() + self._steps.digest()


def combined(logs: Iterable[EventDigest]) -> str:
    """Return one hash, in hexadecimal digits, over the digests of all logs in their order."""
    whole = hashlib.blake2b(digest_size=16)
    for log in logs:
        whole.update(log.digest())
    return whole.hexdigest()


Action = Callable[[], None]


@dataclass(eq=False, slots=True)
class Actor:
    """Represent one participant of a simulation, which schedules events and at which events happen: the clients, a
    gateway or a worker.

    - `rank`: events at one time run in ascending rank of the actors that scheduled them.
    - `log`: the digest of what happened at the actor.
    - `held`: None while the actor runs. While the actor is halted, its events are collected here; once the actor is
      gone, the deque has `maxlen` 0 and drops them.
    """

    rank: int
    log: EventDigest = field(default_factory=EventDigest)
    held: deque[SimEvent] | None = None

    def vanish(self) -> None:
        """Mark the actor as gone: its events are dropped from now on."""
        self.held = deque(maxlen=0)

    @property
    def is_gone(self) -> bool:
        return self.held is not None and self.held.maxlen == 0


@dataclass(eq=False, slots=True)
class SimEvent:
    """An event that happens at the actor `to`.

    `action`: the function to call; None once the event has run or was cancelled. `label`: the entry that the event
    makes in the log of `to` when it runs; an empty label makes no entry.
    """

    label: str
    action: Action | None
    to: Actor


class SimEventQueue:
    """Hold the virtual clock and the pending events, and run the events in order of time.

    `now`: virtual seconds; `num_run`: events run so far. An event that a running event schedules for the same time runs
    after it.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        self._heap: list[tuple[float, bool, int, int, SimEvent]] = []
        self._num_scheduled = 0
        self._reached = -1

    def at(
        self, time: float, label: str, action: Action, *, by: Actor, to: Actor | None = None, is_end: bool = False
    ) -> SimEvent:
        """Schedule an event by the actor `by` that happens at the actor `to` (`by` itself when `to` is None), and
        return it.

        `action` is called at the virtual time `time`. `label`: as in `SimEvent`. `is_end`: the event ends something
        that took time; such events run before all others at their time. Raises ValueError when the time has passed or
        is NaN."""
        if not time >= self.now:
            raise ValueError(f"{label} at {time}, but it is {self.now} already")
        event = SimEvent(label, action, by if to is None else to)
        heapq.heappush(self._heap, (time, not is_end, by.rank, self._num_scheduled, event))
        self._num_scheduled += 1
        return event

    def after(self, seconds: float, label: str, action: Action, *, by: Actor, to: Actor | None = None) -> SimEvent:
        return self.at(self.now + seconds, label, action, by=by, to=to)

    def cancel(self, event: SimEvent | None) -> None:
        """Cancel an event, which then makes no entry in a log; do nothing for None or when the event has already
        run."""
        if event is not None:
            event.action = None

    def halt(self, party: Actor) -> None:
        """Halt an actor: hold all events that happen at it until `go_on`."""
        party.held = deque()

    def go_on(self, party: Actor) -> None:
        """Resume a halted actor: schedule its held events for now, in their order. Do nothing for an actor that runs or
        is gone."""
        if party.held is None or party.is_gone:
            return
        held, party.held = party.held, None
        for event in held:
            heapq.heappush(self._heap, (self.now, True, party.rank, self._num_scheduled, event))
            self._num_scheduled += 1

    def has_passed(self, time: float, by: Actor) -> bool:
        """Return whether an event that the actor `by` scheduled for `time` would have run by now.

        When an actor schedules several events for one time, the answer is for the first of them.
        """
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
            if event.to.held is not None:
                event.to.held.append(event)
                continue
            event.action = None
            if is_later and rank > self._reached:
                self._reached = rank
            self.num_run += 1
            if event.label:
                event.to.log.note(time, event.label)
            action()

    @property
    def num_pending(self) -> int:
        """Count the events that have not run and were not cancelled."""
        return sum(1 for *_, event in self._heap if event.action is not None)

    def __repr__(self) -> str:
        return f"<event queue at {self.now:.6f} s, {self.num_run} run, {self.num_pending} pending>"
