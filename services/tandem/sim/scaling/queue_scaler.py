"""The plain autoscaler that others bring along: as many workers as keep the requests at each near a number; never looks
at tokens, times or targets.

As Ray Serve's default policy does it (`autoscaling_config` of Ray 2.60): requests are averaged over `look_back_s`,
divided by the number that is wanted at each worker and rounded up; the size follows when that has asked for a larger
one all through `up_s`, or for a smaller one all through `down_s`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from tandem.scaling.cluster_state import ClusterState
from tandem.scaling.decision import ReplicaTarget
from tandem.scaling.policy import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """`wanted`: ongoing requests of each worker of a role. The delays are Serve's own."""

    wanted: tuple[float, float]
    bounds: Bounds = field(default_factory=Bounds)
    look_back_s: float = 30.0
    up_s: float = 30.0
    down_s: float = 600.0


class QueueScaler:
    """An `Autoscaler`."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._sizes = [_Size(policy, wanted) for wanted in policy.wanted]

    def target(self, observed: ClusterState, ongoing: ReplicaTarget) -> ReplicaTarget:
        now = ReplicaTarget(observed.prefill.num_kept, observed.decode.num_kept)
        return ReplicaTarget(*(
            size.next(observed.at, number, current)
            for size, number, current in zip(self._sizes, ongoing, now, strict=True)
        ))  # fmt: skip


class _Size:
    """Of one role. `_since`: from when on all have asked for more, or for fewer."""

    def __init__(self, policy: QueuePolicy, wanted: float) -> None:
        self._policy = policy
        self._wanted = wanted
        self._seen: deque[tuple[float, int]] = deque()
        self._way = 0
        self._since = 0.0

    def next(self, at: float, ongoing: int, current: int) -> int:
        self._seen.append((at, ongoing))
        while self._seen[0][0] <= at - self._policy.look_back_s:
            self._seen.popleft()
        mean = sum(number for _, number in self._seen) / len(self._seen)
        number = self._policy.bounds.clamped(math.ceil(mean / self._wanted - 1e-9))
        way = (number > current) - (number < current)
        if way != self._way:
            self._way, self._since = way, at
        delay_s = self._policy.up_s if way > 0 else self._policy.down_s
        if way == 0 or at - self._since < delay_s:
            return current
        self._since = at
        return number
