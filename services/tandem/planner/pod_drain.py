"""Remembers which pods are to go and what is left on them; never deletes one.

Only this planner's own wish makes a pod leave, or that its workers have been drained and idle for long: somebody else
began it, a planner before this one say, and a worker that was drained never takes work again. A worker that Serve ends
for reasons of its own is gone before that. A worker that is out of sight may serve all the same: it is asked where it
was seen last, and a pod counts as not started yet only where this planner saw it appear.
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
"""Workers that have been drained and idle for so long are of no use to anybody."""
LOST_S = 120.0
"""A pod whose workers have been out of sight for so long, and do not answer, has none: gateways lose one in a tenth of
that."""
AWAY_S = 30.0
"""Of a pod that appeared while nobody looked for so long it is not known whether it had a worker."""


class PodDrain:
    """Of all pods of a cluster, by name."""

    def __init__(self, census: WorkerInventory, clock: Clock) -> None:
        self._census = census
        self._clock = clock
        self._leaving: set[str] = set()
        self._emptied: set[str] = set()
        self._left: dict[WorkerRef, int | None] = {}
        self._idle_since: dict[str, float] = {}
        self._unborn: set[str] = set()
        self._met_at: dict[str, float] = {}
        self._met: dict[str, list[WorkerState]] = {}
        self._looked_at = -math.inf

    def look(self, pods: Sequence[Pod], workers: Sequence[WorkerState]) -> dict[str, PodView]:
        """`workers` of all models. Raises ActuatorFailed where it cannot be told
        which worker is in which pod."""
        _require_own_addresses(pods)
        self._forget({pod.name for pod in pods}, {worker.ref for worker in workers})
        self._greet(pods)
        return {pod.name: self._view(pod, _inside(pod, workers)) for pod in pods}

    async def ask(self, names: Iterable[str], pods: Sequence[Pod], workers: Sequence[WorkerState]) -> None:
        """Have the workers of these leave; again, for what is left, of those that have been asked before."""
        self._leaving |= set(names)
        asked = [worker for pod in pods if pod.name in self._leaving for worker in self._asked(pod, workers)]
        self._left |= await self._census.drain(asked)

    def _view(self, pod: Pod, inside: Sequence[WorkerState]) -> PodView:
        now, name = self._clock.now(), pod.name
        if inside:
            self._met_at[name], self._met[name] = now, list(inside)
            self._unborn.discard(name)
        is_idle = bool(inside) and all(worker.is_draining and not worker.num_jobs for worker in inside)
        since = self._idle_since.setdefault(name, now) if is_idle else self._idle_since.pop(name, now)
        if is_idle and now - since >= ADOPT_S:
            self._leaving.add(name)
        left = [self._left.get(worker.ref) for worker in self._met.get(name, ())]
        if left and not any(number != 0 for number in left):
            self._emptied.add(name)
        elif inside or any(left):
            self._emptied.discard(name)
        return PodView(
            name=name,
            num_jobs=sum(worker.num_jobs for worker in inside) if inside else None,
            is_leaving=name in self._leaving,
            is_empty=name in self._emptied,
            is_unborn=name in self._unborn,
            is_lost=not inside
            and name not in self._unborn
            and now - self._met_at[name] >= LOST_S
            and all(number is None for number in left),
            is_ending=pod.is_ending,
        )

    def _asked(self, pod: Pod, workers: Sequence[WorkerState]) -> list[WorkerState]:
        return _inside(pod, workers) or self._met.get(pod.name, [])

    def _greet(self, pods: Sequence[Pod]) -> None:
        """Those that were not there before; what was there at a first look counts as met then."""
        now, names = self._clock.now(), {pod.name for pod in pods}
        fresh = names - {*self._met_at}
        self._unborn |= fresh if now - self._looked_at < AWAY_S else set()
        self._met_at |= dict.fromkeys(fresh, now)
        self._looked_at = now

    def _forget(self, pods: set[str], workers: set[WorkerRef]) -> None:
        self._leaving &= pods
        self._emptied &= pods
        self._unborn &= pods
        self._met = {name: met for name, met in self._met.items() if name in pods}
        kept = workers | {worker.ref for met in self._met.values() for worker in met}
        self._left = {worker: left for worker, left in self._left.items() if worker in kept}
        self._idle_since = {name: since for name, since in self._idle_since.items() if name in pods}
        self._met_at = {name: at for name, at in self._met_at.items() if name in pods}


def _inside(pod: Pod, workers: Sequence[WorkerState]) -> list[WorkerState]:
    """By their address: a worker announces that of its pod."""
    return [worker for worker in workers if pod.ip and worker.ref.address.rpartition(":")[0].strip("[]") == pod.ip]


def _require_own_addresses(pods: Sequence[Pod]) -> None:
    owner: dict[str, str] = {}
    for pod in pods:
        if pod.ip and not pod.is_ending and owner.setdefault(pod.ip, pod.name) != pod.name:
            raise ActuatorFailed(
                f"pods {owner[pod.ip]} and {pod.name} both have address {pod.ip}: which worker is in which is not known"
            )
