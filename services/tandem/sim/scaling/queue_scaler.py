"""Scale a pool by its number of ongoing requests: the baseline autoscaler to compare with.

The rule is that of Ray Serve's default policy (`autoscaling_config` of Ray 2.60): ongoing requests are averaged over
`look_back_s`, divided by the target number per worker and rounded up. The size changes once that number has been larger
than the current size throughout `up_s`, or smaller throughout `down_s`. Tokens, times and latency targets are ignored.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from tandem.scaling.cluster_state import ClusterState
from tandem.scaling.decision import ReplicaTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """Settings of a `QueueScaler`.

    `ongoing_per_worker`: target number of ongoing requests at each worker of the prefill and of the decode role.
    `look_back_s`: seconds over which ongoing requests are averaged. `up_s`, `down_s`: seconds for which more or fewer
    workers must have been needed before the number changes. The defaults are those of Ray Serve."""

    ongoing_per_worker: tuple[float, float]
    look_back_s: float = 30.0
    up_s: float = 30.0
    down_s: float = 600.0


class QueueScaler:
    """Autoscaler that keeps the ongoing requests of each worker near a target number; implements `Autoscaler`."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._sizes = [_Size(policy, ongoing_per_worker) for ongoing_per_worker in policy.ongoing_per_worker]

    def target(self, observed: ClusterState, ongoing: ReplicaTarget) -> ReplicaTarget:
        now = ReplicaTarget(observed.prefill.num_kept, observed.decode.num_kept)
        return ReplicaTarget(*(
            size.next(observed.at, number, current)
            for size, number, current in zip(self._sizes, ongoing, now, strict=True)
        ))  # fmt: skip


class _Size:
    """Compute the size of one role from its ongoing requests.

    `_direction`: 1, -1 or 0, when more, fewer or as many workers are needed; `_since`: the time from which `_direction`
    has been the same."""

    def __init__(self, policy: QueuePolicy, ongoing_per_worker: float) -> None:
        self._policy = policy
        self._ongoing_per_worker = ongoing_per_worker
        self._seen: deque[tuple[float, int]] = deque()
        self._direction = 0
        self._since = 0.0

    def next(self, at: float, ongoing: int, current: int) -> int:
        self._seen.append((at, ongoing))
        while self._seen[0][0] <= at - self._policy.look_back_s:
            self._seen.popleft()
        mean = sum(number for _, number in self._seen) / len(self._seen)
        number = max(1, math.ceil(mean / self._ongoing_per_worker - 1e-9))
        direction = (number > current) - (number < current)
        if direction != self._direction:
            self._direction, self._since = direction, at
        delay_s = self._policy.up_s if direction > 0 else self._policy.down_s
        if direction == 0 or at - self._since < delay_s:
            return current
        self._since = at
        return number
