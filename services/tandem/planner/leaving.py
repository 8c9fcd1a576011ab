"""Remembers which pods are to go and what is left on them; never deletes one.

Only this planner's own wish makes a pod leave, or that its workers have been drained and idle for long: somebody else
began it, a planner before this one say, and a worker that was drained never takes work again. A worker that Serve ends
for reasons of its own is gone before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.core.clock import Clock
from tandem.core.ids import WorkerRef
from tandem.planner.actuator import ActuatorFailed
from tandem.planner.census import Census
from tandem.planner.group import PodView
from tandem.planner.pods import Pod
from tandem.planner.worker_state import WorkerState

ADOPT_S = 60.0
"""Workers that have been drained and idle for so long are of no use to anybody."""
LOST_S = 120.0
"""A pod whose workers have been out of sight for so long has none: gateways lose one in a tenth of that."""


class Leaving:
    """Of all pods of a cluster, by name."""

    def __init__(self, census: Census, clock: Clock) -> None:
        self._census = census
        self._clock = clock
        self._leaving: set[str] = set()
        self._emptied: set[str] = set()
        self._left: dict[WorkerRef, int | None] = {}
        self._idle_since: dict[str, float] = {}
        self._met_at: dict[str, float] = {}

    def look(self, pods: Sequence[Pod], workers: Sequence[WorkerState]) -> dict[str, PodView]:
        """`workers` of all models. Raises ActuatorFailed where it cannot be told
        which worker is in which pod."""
        _require_own_addresses(pods)
        self._forget({pod.name for pod in pods}, {worker.ref for worker in workers})
        return {pod.name: self._view(pod, _inside(pod, workers)) for pod in pods}

    async def ask(self, names: Iterable[str], pods: Sequence[Pod], workers: Sequence[WorkerState]) -> None:
        """Have the workers of these leave; again, for what is left, of those that have been asked before."""
        self._leaving |= set(names)
        asked = [worker for pod in pods if pod.name in self._leaving for worker in _inside(pod, workers)]
        self._left |= await self._census.drain(asked)

    def _view(self, pod: Pod, inside: Sequence[WorkerState]) -> PodView:
        now, name = self._clock.now(), pod.name
        if inside:
            self._met_at[name] = now
        is_idle = bool(inside) and all(worker.is_draining and not worker.num_jobs for worker in inside)
        since = self._idle_since.setdefault(name, now) if is_idle else self._idle_since.pop(name, now)
        if is_idle and now - since >= ADOPT_S:
            self._leaving.add(name)
        if inside and all(self._left.get(worker.ref) == 0 for worker in inside):
            self._emptied.add(name)
        elif inside:
            self._emptied.discard(name)
        return PodView(
            name=name,
            num_jobs=sum(worker.num_jobs for worker in inside) if inside else None,
            is_leaving=name in self._leaving,
            is_empty=name in self._emptied,
            was_met=name in self._met_at and now - self._met_at[name] < LOST_S,
            is_ending=pod.is_ending,
        )

    def _forget(self, pods: set[str], workers: set[WorkerRef]) -> None:
        self._leaving &= pods
        self._emptied &= pods
        self._left = {worker: left for worker, left in self._left.items() if worker in workers}
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
