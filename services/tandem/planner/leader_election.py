"""Elect one leader of several planners by a Kubernetes Lease that the leader renews.

The state machine does no I/O: its caller reads and writes the Lease. A candidate measures on its own clock how long it
has seen the Lease unchanged, so clocks of different planners need not agree. A leader measures the lease time from when
it *sent* its last renewal, and stops leading a third of the lease time before another planner may begin to lead. A
request that it sends shortly before it stops must be over by then, so a request may take no longer than that third.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

RENEW_SHARE = 6
"""Number of renewals in one lease time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """Content of a Kubernetes Lease, as it was read or is to be written.

    `holder`: name of the planner that holds it, empty if none does. `lease_s`: seconds without renewal after which
    another planner may take it. `renewed`, `acquired`: times as the server stores them, for people. `num_changes`: how
    often its holder has changed. `owners`: references to the objects whose deletion makes the server delete it.
    `version`: resourceVersion that was read."""

    holder: str = ""
    lease_s: float = 0.0
    renewed: str = ""
    acquired: str = ""
    num_changes: int = 0
    owners: tuple[Mapping[str, Any], ...] = ()
    version: str = ""


class Election:
    """Decides for one planner, the candidate `me`, when it may take or renew the Lease and whether it leads.

    It does no I/O: pass it each Lease that was read (`saw`), write the one that `claim` returns, and pass the server's
    reply to `claimed`. `lease_s`: seconds without renewal after which another planner may take the Lease. Every `now`
    is in seconds of one monotonic clock."""

    def __init__(self, me: str, lease_s: float) -> None:
        self.me = me
        self.lease_s = lease_s
        self._seen: LeaseView | None = None
        self._seen_at = -math.inf
        self._sent_at = -math.inf

    @property
    def period_s(self) -> float:
        """Return the interval in seconds at which the Lease must be read and renewed."""
        return self.lease_s / RENEW_SHARE

    @property
    def request_s(self) -> float:
        """Return the longest time in seconds that a leader's request for a change may take.

        A request within this time is over before another planner can lead.
        """
        return self.lease_s / 3

    @property
    def holder(self) -> str:
        """Return the name of the planner that held the Lease when it was last read.

        Empty if none held it or it was never read."""
        return self._seen.holder if self._seen is not None else ""

    def leads(self, now: float) -> bool:
        """Return whether this planner may send requests for changes at time `now`."""
        return now < self._sent_at + self.lease_s - self.request_s

    def saw(self, lease: LeaseView, now: float) -> None:
        """Record the current content of the Lease, at time `now`, after it was read or written.

        If this planner does not hold it, it stops leading."""
        if lease != self._seen:
            self._seen = lease
            self._seen_at = now
        if lease.holder != self.me:
            self._sent_at = -math.inf

    def claim(self, now: float) -> LeaseView | None:
        """Return the Lease to write at time `now`, to take it or renew it; None while another planner holds it.

        The result replaces the Lease that was last passed to `saw`. So `saw` must have been called before."""
        seen = self._seen
        assert seen is not None
        if seen.holder == self.me:
            return replace(seen, lease_s=self.lease_s)
        if seen.holder and now < self._seen_at + max(seen.lease_s, self.lease_s):
            return None
        changes = seen.num_changes + 1
        return replace(seen, holder=self.me, lease_s=self.lease_s, num_changes=changes, renewed="", acquired="")

    def claimed(self, lease: LeaseView, sent_at: float, now: float) -> None:
        """Record the Lease that the server returned for a claim, and lead if this planner is its holder.

        `lease`: the returned Lease. `sent_at`: time when the claim was sent. `now`: time when the reply arrived. This
        planner leads until two thirds of the lease time have passed since `sent_at`."""
        self.saw(lease, now)
        if lease.holder == self.me:
            self._sent_at = max(self._sent_at, sent_at)

    def resigned(self) -> LeaseView | None:
        """Stop leading, and return the Lease to write so that another planner need not wait until the Lease expires.

        Returns None if this planner does not hold the Lease."""
        seen = self._seen
        self._sent_at = -math.inf
        return replace(seen, holder="", lease_s=1.0) if seen is not None and seen.holder == self.me else None
