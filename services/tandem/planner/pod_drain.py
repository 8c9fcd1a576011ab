"""Track which pods are draining and whether jobs or leases are left on them.

A pod drains if this planner requested it, or if its workers have been drained and idle for long: then another planner,
usually the previous leader, started the drain. Such a drain ends where a worker accepts work again, because somebody
has undone it (`tandem drain --undo`). A worker that Serve ends for its own reasons is gone before that time. A worker
that is not in the registry may still serve: it is drained at its last known address, and a pod counts as starting only
if this planner saw the pod appear.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from tandem.core.addresses import host_of
from tandem.core.clock import Clock
from tandem.core.ids import WorkerRef
from tandem.planner.actuator import ActuatorFailed
from tandem.planner.pod_watch import Pod
from tandem.planner.worker_group import PodView
from tandem.planner.worker_inventory import WorkerInventory
from tandem.scaling.worker_state import WorkerState

ADOPT_S = 60.0
"""Seconds after which a pod whose workers are drained and idle counts as draining."""
LOST_S = 120.0
"""Seconds after which a pod counts as lost if its workers are not registered and do not answer. Gateways drop a worker
after a tenth of that time."""
AWAY_S = 30.0
"""Longest interval between two calls of `PodDrain.look`, in seconds, with which a pod that is new at the second call
counts as starting. In a longer interval the pod may have had a worker that nobody saw."""


@dataclass(slots=True)
class _PodState:
    """Describe what is known of a pod. `is_starting`: it appeared during this planner's watch and has had no worker
    yet. `is_requested`, `is_adopted`: it drains because this planner requested it, or because its workers have been
    drained and idle for long. `idle_since`: time from which on all its workers are drained and idle; infinite if they
    are not. `workers`: the workers seen in it last."""

    last_seen_at: float
    is_starting: bool
    is_requested: bool = False
    is_adopted: bool = False
    is_empty: bool = False
    idle_since: float = math.inf
    workers: Sequence[WorkerState] = ()

    @property
    def is_draining(self) -> bool:
        return self.is_requested or self.is_adopted


class PodDrain:
    """Tracks for each pod of a cluster whether it is draining and whether jobs or leases are left on its workers.

    `drain` starts draining pods; each further call updates the number of jobs and leases that are left on draining
    pods. `look` returns the state of each pod. `inventory`: calls the workers. `spanning`: names of the groups whose
    workers have several pods. Such a pod counts neither as starting nor as lost while there is a registered worker that
    has never answered, because that worker may have ranks in it."""

    def __init__(self, inventory: WorkerInventory, clock: Clock, spanning: Collection[str] = ()) -> None:
        self._inventory = inventory
        self._spanning = spanning
        self._clock = clock
        self._pods: dict[str, _PodState] = {}
        self._num_left: dict[WorkerRef, int | None] = {}
        self._hosts: dict[WorkerRef, tuple[str, ...]] = {}
        self._knows_all_hosts = False
        self._looked_at = -math.inf

    def look(self, pods: Sequence[Pod], workers: Sequence[WorkerState]) -> dict[str, PodView]:
        """Return the state of each pod, by pod name, and record which pods and workers exist now.

        `pods`: all pods of the cluster. `workers`: registered workers of all models. A worker belongs to each pod whose
        address is one of its hosts. Raises ActuatorFailed when two pods share an address, because their workers cannot
        be told apart."""
        _require_own_addresses(pods)
        now = self._clock.now()
        # At the first look all pods count as just seen, and none as starting.
        fresh = _PodState(last_seen_at=now, is_starting=now - self._looked_at < AWAY_S)
        self._pods = {pod.name: self._pods.get(pod.name) or replace(fresh) for pod in pods}
        self._looked_at = now
        known_workers = {worker.ref for worker in workers}
        known_workers |= {worker.ref for state in self._pods.values() for worker in state.workers}
        self._num_left = {worker: num_left for worker, num_left in self._num_left.items() if worker in known_workers}
        self._hosts = {worker: hosts for worker, hosts in self._hosts.items() if worker in known_workers}
        self._hosts |= {worker.ref: worker.hosts for worker in workers if worker.hosts}
        self._knows_all_hosts = all(worker.ref in self._hosts for worker in workers)
        return {pod.name: self._pod_view(pod, self._inside(pod, workers)) for pod in pods}

    async def drain(self, names: Iterable[str], pods: Sequence[Pod], workers: Sequence[WorkerState]) -> None:
        """Start draining the workers of the pods `names`; repeat the request for pods that are draining already.

        `pods`, `workers`: all pods of the cluster and all registered workers. The workers reply how many jobs and
        leases are left on them; the next call of `look` takes this into account. `look` must have been called for the
        pods `names` before. A worker that does not answer raises nothing."""
        for name in names:
            self._pods[name].is_requested = True
        states = [(pod, self._pods[pod.name]) for pod in pods if pod.name in self._pods]
        affected = [
            worker
            for pod, state in states
            if state.is_draining
            for worker in self._inside(pod, workers) or state.workers
        ]
        self._num_left |= await self._inventory.drain(list({worker.ref: worker for worker in affected}.values()))

    def _inside(self, pod: Pod, workers: Sequence[WorkerState]) -> list[WorkerState]:
        """Return the registered workers with a rank in a pod: those with the pod's address among their hosts, or as
        their own address while their hosts are not known."""
        if not pod.ip:
            return []
        return [w for w in workers if pod.ip in (self._hosts.get(w.ref) or (host_of(w.ref.address),))]

    def _pod_view(self, pod: Pod, inside: Sequence[WorkerState]) -> PodView:
        now, state = self._clock.now(), self._pods[pod.name]
        if inside:
            state.last_seen_at = now
            state.workers = inside
            state.is_starting = False
        is_idle = bool(inside) and all(worker.is_draining and not worker.num_jobs for worker in inside)
        state.idle_since = min(state.idle_since, now) if is_idle else math.inf
        if now - state.idle_since >= ADOPT_S:
            state.is_adopted = True
        elif any(worker.load is not None and not worker.load.draining for worker in inside):
            state.is_adopted = False
        is_known = self._knows_all_hosts or pod.group not in self._spanning
        num_left = [self._num_left.get(worker.ref) for worker in state.workers]
        if num_left and not any(number != 0 for number in num_left):
            state.is_empty = True
        elif inside or any(num_left):
            state.is_empty = False
        return PodView(
            name=pod.name,
            num_jobs=sum(worker.num_jobs for worker in inside) if inside else None,
            is_draining=state.is_draining,
            is_empty=state.is_empty,
            is_starting=state.is_starting and is_known,
            is_lost=is_known
            and not inside
            and not state.is_starting
            and now - state.last_seen_at >= LOST_S
            and all(number is None for number in num_left),
            is_ending=pod.is_ending,
            spanning_worker=next(
                (worker.ref.id for worker in state.workers if len(self._hosts.get(worker.ref, ())) > 1), ""
            ),
        )


def _require_own_addresses(pods: Sequence[Pod]) -> None:
    owner: dict[str, str] = {}
    for pod in pods:
        if pod.ip and not pod.is_ending and owner.setdefault(pod.ip, pod.name) != pod.name:
            raise ActuatorFailed(
                f"pods {owner[pod.ip]} and {pod.name} both have address {pod.ip}: which worker is in which is not known"
            )
