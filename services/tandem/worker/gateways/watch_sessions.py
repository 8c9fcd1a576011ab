"""Track which gateway watches which jobs, over which stream, and how long a gateway has had no stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from tandem.core.events import JobEvent
from tandem.core.ids import GatewayId, JobKey
from tandem.worker.gateways.outbox import Outbox


class Watch:
    """One Watch stream of a gateway. `is_over`: a newer stream replaced it. `is_closing`: it ends once everything was
    sent."""

    def __init__(self, box: Outbox) -> None:
        self.box = box
        self.wake = asyncio.Event()
        self.is_over = False
        self.is_closing = False

    def end(self) -> None:
        self.is_over = True
        self.wake.set()

    def close(self) -> None:
        self.is_closing = True
        self.wake.set()


class WatchSessions:
    """Own the outboxes and streams of all gateways. All calls on the event loop; times are seconds of the caller's
    clock."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._boxes: dict[GatewayId, Outbox] = {}
        # The outbox of each registered job. It may still have jobs that their outbox has dropped since the last sweep.
        self._box_of: dict[JobKey, Outbox] = {}
        self._watches: dict[GatewayId, Watch] = {}
        self._absent_since: dict[GatewayId, float] = {}
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<gateways {list(self._boxes.values())}, {len(self._absent_since)} absent>"

    def __len__(self) -> int:
        return len(self._boxes)

    def register(self, gateway: GatewayId, keys: Sequence[JobKey], first_index: int, now: float) -> bool:
        """Register a job that is about to be submitted. Returns False, without a change, when one of its choices is
        registered."""
        if any(key in self._box_of and key in self._box_of[key] for key in keys):
            return False
        box = self._open(gateway, now)
        for key in keys:
            box.register(key, first_index)
            self._box_of[key] = box
        return True

    def discard(self, keys: Iterable[JobKey]) -> None:
        """Remove a registered job that was refused."""
        for key in keys:
            box = self._box_of.pop(key, None)
            if box is not None:
                box.discard(key)

    def deliver(self, events: Iterable[JobEvent]) -> None:
        """Put events into their outboxes and wake the streams; events of unregistered jobs are dropped."""
        touched: set[GatewayId] = set()
        for event in events:
            box = self._box_of.get(event.key)
            if box is not None and event.key in box:
                box.push(event)
                touched.add(box.gateway)
        for gateway in touched:
            if gateway in self._watches:
                self._watches[gateway].wake.set()

    def wake(self) -> None:
        """Have every stream send a message, at least as a heartbeat."""
        for watch in self._watches.values():
            watch.wake.set()

    def attach(self, gateway: GatewayId, positions: Mapping[JobKey, int], now: float) -> tuple[Watch, list[JobKey]]:
        """Open a stream in place of any older one. Returns the stream, and the live jobs that the gateway did not
        list."""
        box = self._open(gateway, now)
        unlisted = box.resume(positions)
        old = self._watches.pop(gateway, None)
        if old is not None:
            old.end()
        watch = self._watches[gateway] = Watch(box)
        self._absent_since.pop(gateway, None)
        if self._is_closing:
            watch.close()
        return watch, unlisted

    def detach(self, watch: Watch, now: float) -> None:
        """Record the end of a stream: its gateway counts as absent, unless a newer stream replaced this one."""
        gateway = watch.box.gateway
        if self._watches.get(gateway) is watch:
            del self._watches[gateway]
            self._absent_since[gateway] = now

    def sweep(self, now: float) -> list[JobKey]:
        """Drop jobs that ended long ago and gateways absent for `grace_s` seconds; returns the live jobs of those
        gateways."""
        lost: list[JobKey] = []
        for box in self._boxes.values():
            box.forget(now)
        for gateway in [g for g, since in self._absent_since.items() if now - since >= self.grace_s]:
            del self._absent_since[gateway]
            lost += self._boxes.pop(gateway).live()
        self._box_of = {key: box for box in self._boxes.values() for key in box}
        return lost

    def close(self) -> None:
        """Let every stream, later ones included, send what is there and end."""
        self._is_closing = True
        for watch in self._watches.values():
            watch.close()

    def _open(self, gateway: GatewayId, now: float) -> Outbox:
        if gateway not in self._boxes:
            self._boxes[gateway] = Outbox(gateway, self.grace_s)
            self._absent_since[gateway] = now
        return self._boxes[gateway]
