"""Scale the worker groups of a RayCluster whose own autoscaler is off; add pods at once, and remove pods after a drain.

Only one planner at a time acts. The number of replicas is published for Serve too, and is never below the number of
workers for which the pods have room: otherwise Serve would end workers of its own choice in addition to those that
drain.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tandem.core.ray_worker_groups import WorkerGroup
from tandem.planner.actuator import ActuationResult, ActuatorFailed
from tandem.planner.kube_error import Backoff, KubeError
from tandem.planner.lease_keeper import LeaseKeeper
from tandem.planner.pod_drain import PodDrain
from tandem.planner.pod_watch import Pod
from tandem.planner.pool_targets import PoolTargets
from tandem.planner.ray_cluster import Cluster, ClusterFinder
from tandem.planner.serve_actuator import ServeActuator
from tandem.planner.worker_group import GroupPatch, GroupView, next_step
from tandem.scaling.worker_state import WorkerState

TRIES = 5
"""Number of tries for one decision; the next decision follows soon."""
_T = TypeVar("_T")


class NotLeading(Exception):
    """Raised when this planner does not hold the Lease and so must not change the cluster."""


@dataclass(frozen=True, slots=True, eq=False)
class RayClusterActuator:
    """Actuator that scales the worker groups of the Kubernetes RayCluster that `finder` finds.

    Pods are added directly and removed after a drain. It acts only while `leadership` holds the Lease. `pod_drain`
    drains pods. `serve` publishes the same numbers for Ray Serve and sets roles. `retries` repeats failed calls of the
    API server."""

    finder: ClusterFinder
    leadership: LeaseKeeper
    pod_drain: PodDrain
    serve: ServeActuator
    retries: Retries

    @property
    def leads(self) -> bool:
        return self.leadership.leads

    async def starting(self, model: str, workers: Sequence[WorkerState]) -> dict[str, int]:
        """Return how many workers of `model` are still to register from the requested pods, by the role of their pool.

        `workers`: all registered workers, of all models. The workers of draining pods are still registered, so these
        pods do not count as starting. Raises ActuatorFailed."""
        found = await self.serve.starting(model, workers)
        cluster = await self.retries.of(lambda: asyncio.to_thread(self.finder.read))
        num_registered = Counter(worker.pool for worker in workers if worker.model == model)
        for group in self.finder.groups:
            room = group.room_of(cluster.groups[group.role].replicas)
            found[group.role] = max(0, room - num_registered[group.role])
        return found

    async def carry_out(
        self, model: str, targets: PoolTargets, reasons: tuple[str, ...], workers: Sequence[WorkerState]
    ) -> ActuationResult:
        replicas, changed = targets
        try:
            step_notes, room = await self.retries.of(lambda: self._reconcile(replicas, workers))
        except NotLeading:
            return ActuationResult(
                "standby", {}, (f"{self.leadership.election.holder or 'nobody'} leads, not this planner",)
            )
        num_registered = Counter(worker.pool for worker in workers if worker.model == model)
        # No fewer than are registered either: Serve may notice the end of a pod later than the planner.
        held = {role: max(number, num_registered[role]) for role, number in room.items()}
        serve_replicas = {role: max(number, held.get(role, 0)) for role, number in replicas.items()}
        holder = await self.serve.publish_target(model, serve_replicas, reasons)
        serve_notes = () if self.serve.leads else (f"Serve still follows planner {holder}",)
        return ActuationResult(
            "carried_out", replicas, (*step_notes, *serve_notes, *await self.serve.change_roles(changed))
        )

    async def close(self) -> None:
        await asyncio.to_thread(self.finder.close)
        await self.serve.close()

    # ---- internals

    async def _reconcile(
        self, replicas: Mapping[str, int], workers: Sequence[WorkerState]
    ) -> tuple[tuple[str, ...], dict[str, int]]:
        """Read the cluster, and make one step towards `replicas`. Returns what was done, in sentences, and for how many
        workers, by role, the pods have room after the step. Raises KubeError."""
        self._require_lead()
        cluster = await asyncio.to_thread(self.finder.read)
        pods = await asyncio.to_thread(self.finder.pods, cluster)
        await self.pod_drain.drain((), pods, workers)
        steps = await self._steps(cluster, replicas, pods, workers)
        if any(step.replicas < view.replicas or step.unlists(view) for view, step in steps):
            # The watch may lag behind. If a pod died unnoticed and was replaced, one pod more than named would be
            # deleted, of KubeRay's choice. If a pod that is to be deleted is not seen yet, it would not be named again.
            pods = await asyncio.to_thread(self.finder.pods_now, cluster)
            steps = await self._steps(cluster, replicas, pods, workers)
        operations = [part for view, step in steps if step.changes(view) for part in step.operations(view)]
        if operations:
            self._require_lead()
            # The patch applies only to the version that was read; after a conflict everything is read again.
            version_check = {"op": "replace", "path": "/metadata/resourceVersion", "value": cluster.version}
            await asyncio.to_thread(self.finder.api.patch_cluster, cluster.name, [*operations, version_check])
        pod_names = {pod.name for pod in pods}
        held = {
            group.role: _num_workers(group, step, pod_names)
            for group, (_, step) in zip(self.finder.groups, steps, strict=True)
        }
        return tuple(reason for _, step in steps for reason in step.reasons), held

    async def _steps(
        self, cluster: Cluster, replicas: Mapping[str, int], pods: Sequence[Pod], workers: Sequence[WorkerState]
    ) -> list[tuple[GroupView, GroupPatch]]:
        return [await self._step(cluster, group, replicas[group.role], pods, workers) for group in self.finder.groups]

    async def _step(
        self, cluster: Cluster, group: WorkerGroup, number: int, pods: Sequence[Pod], workers: Sequence[WorkerState]
    ) -> tuple[GroupView, GroupPatch]:
        """Compute the step of one group, and drain the pods that it names; these may be empty at once, so the step is
        computed again."""
        view, desired = cluster.groups[group.role], group.pods_for(number) + group.num_spare
        step = self._next(view, pods, workers, desired, group)
        if not step.drain:
            return view, step
        self._require_lead()
        await self.pod_drain.drain(step.drain, pods, workers)
        return view, self._next(view, pods, workers, desired, group).after(step)

    def _next(
        self, view: GroupView, pods: Sequence[Pod], workers: Sequence[WorkerState], desired: int, group: WorkerGroup
    ) -> GroupPatch:
        pod_views = self.pod_drain.look(pods, workers)
        inside = [pod_views[pod.name] for pod in pods if pod.group == view.name and pod.name in pod_views]
        return next_step(view, inside, desired, group.num_spare, group.num_pods)

    def _require_lead(self) -> None:
        if not self.leadership.leads:
            raise NotLeading


def _num_workers(group: WorkerGroup, step: GroupPatch, pod_names: Collection[str]) -> int:
    """Count the workers for which a group has room. A pod that is being deleted counts until it is gone, in addition to
    the group's number of replicas."""
    return group.room_of(step.replicas + sum(name in pod_names for name in step.listed))


@dataclass(frozen=True, slots=True, eq=False)
class Retries:
    """Repeats an operation after temporary errors of the API server.

    `backoff`: delays between tries. `on_failure` is called with each error. `wait`: sleeps for a number of seconds."""

    backoff: Backoff
    on_failure: Callable[[KubeError], None]
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def of(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Await `attempt()` and return its result; after a conflict or a transient KubeError, try again.

        Raises ActuatorFailed when TRIES tries have failed, and at once after any other KubeError."""
        self.backoff.worked()
        for number in range(1, TRIES + 1):
            try:
                return await attempt()
            except KubeError as error:
                self.on_failure(error)
                if number == TRIES or not (error.is_conflict or error.is_transient):
                    raise ActuatorFailed(f"the API server: {error}") from error
                await self.wait(self.backoff.failed(error.retry_after_s))
        raise AssertionError("unreachable")
