"""Who of several planners leads, by a Lease that one of them renews; pure: it neither reads nor writes the Lease.

A candidate measures by its own clock how long it has seen the Lease unchanged, so clocks that differ do no harm. A
leader counts from when it *sent* its last renewal and stops a third of the Lease before others may begin; a request
that it sends then must be over before that, so it may take no longer than that third.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

RENEW_SHARE = 6
"""A Lease is renewed so often while it lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A Lease as it was read: `version` is its resourceVersion, `num_changes` how often its holder changed. `holder`
    empty: nobody's."""

    holder: str = ""
    lease_s: float = 0.0
    renewed: str = ""
    acquired: str = ""
    num_changes: int = 0
    version: str = ""


class Election:
    """One candidate. `now` in seconds of a clock that does not go back."""

    def __init__(self, me: str, lease_s: float) -> None:
        self.me = me
        self.lease_s = lease_s
        self._seen: LeaseView | None = None
        self._seen_at = -math.inf
        self._sent_at = -math.inf

    @property
    def period_s(self) -> float:
        """Between two looks at the Lease."""
        return self.lease_s / RENEW_SHARE

    @property
    def request_s(self) -> float:
        """The longest that a request of a leader may take."""
        return self.lease_s / 3

    @property
    def holder(self) -> str:
        """Who held it when it was last seen."""
        return self._seen.holder if self._seen is not None else ""

    def leads(self, now: float) -> bool:
        """Whether a change may be asked for now."""
        return now < self._sent_at + self.lease_s - self.request_s

    def saw(self, lease: LeaseView, now: float) -> None:
        """It was read, or an answer to our own writing."""
        if lease != self._seen:
            self._seen, self._seen_at = lease, now
        if lease.holder != self.me:
            self._sent_at = -math.inf

    def claim(self, now: float) -> LeaseView | None:
        """What to write over the Lease that was last seen; None: it is somebody else's."""
        seen = self._seen
        assert seen is not None
        if seen.holder == self.me:
            return replace(seen, lease_s=self.lease_s)
        if seen.holder and now < self._seen_at + max(seen.lease_s, self.lease_s):
            return None
        return LeaseView(holder=self.me, lease_s=self.lease_s, num_changes=seen.num_changes + 1, version=seen.version)

    def claimed(self, lease: LeaseView, sent_at: float, now: float) -> None:
        """The Lease is ours as of a writing that was sent at `sent_at`."""
        self.saw(lease, now)
        if lease.holder == self.me:
            self._sent_at = max(self._sent_at, sent_at)

    def resigned(self) -> LeaseView | None:
        """What to write so that another one leads at once; None: it is not ours. From now on we lead no more."""
        seen, self._sent_at = self._seen, -math.inf
        return replace(seen, holder="", lease_s=1.0) if seen is not None and seen.holder == self.me else None
