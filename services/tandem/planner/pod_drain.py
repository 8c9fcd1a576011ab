"""Track which pods are draining and what is left on them.

A pod drains if this planner asked for it, or if its workers have been drained and idle for long: then another planner,
usually the one before, started it, and a drained worker does not accept work again. (A worker that Serve ends for its
own reasons is gone before that time.) A worker that is not in the registry may still serve: it is drained at its last
known address, and a pod counts as not started yet only if this planner saw it appear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tandem.core.clock import Clock
from tandem.core.ids import WorkerRef
from tandem.planner.actuator import ActuatorFailed
from tandem.planner.pod_watch import Pod
from tandem.planner.worker_group import PodView
from tandem.planner.worker_inventory import WorkerInventory
from tandem.planner.worker_state import WorkerState

ADOPT_S = 60.0
"""Seconds after which a pod whose workers are drained and idle counts as draining."""
LOST_S = 120.0
"""Seconds after which a pod counts as lost if its workers are not registered and do not answer. Gateways drop a worker
after a tenth of that time."""
AWAY_S = 30.0
"""Longest interval between two looks after which a new pod is known to have had no worker."""


class PodDrain:
    """Own the drain state of all pods of a cluster, by name."""

    def __init__(self, inventory: WorkerInventory, clock: Clock) -> None:
        self._inventory = inventory
        self._clock = clock
        self._draining: set[str] = set()
        self._emptied: set[str] = set()
        self._num_left: dict[WorkerRef, int | None] = {}
        self._idle_since: dict[str, float] = {}
        self._not_started: set[str] = set()
        self._last_seen_at: dict[str, float] = {}
        self._last_workers: dict[str, list[WorkerState]] = {}
        self._looked_at = -math.inf

    def look(self, pods: Sequence[Pod], workers: Sequence[WorkerState]) -> dict[str, PodView]:
        """Return the state of each pod. `workers`: those of all models. Raises ActuatorFailed when two pods share an
        address, so that their workers cannot be told apart."""
        _require_own_addresses(pods)
        self._forget({pod.name for pod in pods}, {worker.ref for worker in workers})
        self._record_new_pods(pods)
        return {pod.name: self._pod_view(pod, _inside(pod, workers)) for pod in pods}

    async def drain(self, names: Iterable[str], pods: Sequence[Pod], workers: Sequence[WorkerState]) -> None:
        """Drain the workers of the pods `names`, and repeat the request for all pods that are draining already, to
        learn what is left on them."""
        self._draining |= set(names)
        affected = [worker for pod in pods if pod.name in self._draining for worker in self._workers_of(pod, workers)]
        self._num_left |= await self._inventory.drain(affected)

    def _pod_view(self, pod: Pod, inside: Sequence[WorkerState]) -> PodView:
        now, name = self._clock.now(), pod.name
        if inside:
            self._last_seen_at[name] = now
            self._last_workers[name] = list(inside)
            self._not_started.discard(name)
        is_idle = bool(inside) and all(worker.is_draining and not worker.num_jobs for worker in inside)
        since = self._idle_since.setdefault(name, now) if is_idle else self._idle_since.pop(name, now)
        if is_idle and now - since >= ADOPT_S:
            self._draining.add(name)
        num_left = [self._num_left.get(worker.ref) for worker in self._last_workers.get(name, ())]
        if num_left and not any(number != 0 for number in num_left):
            self._emptied.add(name)
        elif inside or any(num_left):
            self._emptied.discard(name)
        return PodView(
            name=name,
            num_jobs=sum(worker.num_jobs for worker in inside) if inside else None,
            is_draining=name in self._draining,
            is_empty=name in self._emptied,
            is_starting=name in self._not_started,
            is_lost=not inside
            and name not in self._not_started
            and now - self._last_seen_at[name] >= LOST_S
            and all(number is None for number in num_left),
            is_ending=pod.is_ending,
        )

    def _workers_of(self, pod: Pod, workers: Sequence[WorkerState]) -> list[WorkerState]:
        return _inside(pod, workers) or self._last_workers.get(pod.name, [])

    def _record_new_pods(self, pods: Sequence[Pod]) -> None:
        """Record pods that appeared since the last look; at the first look all pods count as just seen, and none as not
        started."""
        now, names = self._clock.now(), {pod.name for pod in pods}
        fresh = names - {*self._last_seen_at}
        self._not_started |= fresh if now - self._looked_at < AWAY_S else set()
        self._last_seen_at |= dict.fromkeys(fresh, now)
        self._looked_at = now

    def _forget(self, pods: set[str], workers: set[WorkerRef]) -> None:
        self._draining &= pods
        self._emptied &= pods
        self._not_started &= pods
        self._last_workers = {name: workers_seen for name, workers_seen in self._last_workers.items() if name in pods}
        known_workers = workers | {
            worker.ref for workers_seen in self._last_workers.values() for worker in workers_seen
        }
        self._num_left = {worker: num_left for worker, num_left in self._num_left.items() if worker in known_workers}
        self._idle_since = {name: since for name, since in self._idle_since.items() if name in pods}
        self._last_seen_at = {name: seen_at for name, seen_at in self._last_seen_at.items() if name in pods}


def _inside(pod: Pod, workers: Sequence[WorkerState]) -> list[WorkerState]:
    """Return the workers of a pod by their address: a worker advertises the address of its pod."""
    return [worker for worker in workers if pod.ip and worker.ref.address.rpartition(":")[0].strip("[]") == pod.ip]


def _require_own_addresses(pods: Sequence[Pod]) -> None:
    owner: dict[str, str] = {}
    for pod in pods:
        if pod.ip and not pod.is_ending and owner.setdefault(pod.ip, pod.name) != pod.name:
            raise ActuatorFailed(
                f"pods {owner[pod.ip]} and {pod.name} both have address {pod.ip}: which worker is in which is not known"
            )
