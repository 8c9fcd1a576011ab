"""Plans the pods of a RayCluster whose own autoscaler is off: more at once, fewer after their workers have left; never
two planners at a time.

Serve is told its number of replicas too, never fewer than the pods have room for: else it would end workers of its own
choice, while those that were asked to leave go as well.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tandem.core.ray_worker_groups import WorkerGroup
from tandem.planner.actuator import ActuationResult, ActuatorFailed
from tandem.planner.backoff import Backoff
from tandem.planner.kube_error import KubeError
from tandem.planner.lease_keeper import LeaseKeeper
from tandem.planner.pod_drain import PodDrain
from tandem.planner.pod_watch import Pod
from tandem.planner.pool_targets import wanted
from tandem.planner.ray_cluster import Cluster, ClusterFinder
from tandem.planner.serve_actuator import ServeActuator
from tandem.planner.worker_group import GroupPatch, GroupView, next_step
from tandem.planner.worker_state import WorkerState
from tandem.scaling.decision import Decision

TRIES = 5
"""Of one decision; the next one comes soon."""
Patch = Callable[[str, Sequence[Mapping[str, Any]]], None]
"""As `kube.KubeApi.patch_cluster`."""
_T = TypeVar("_T")


class NotLeading(Exception):
    """Somebody else has the Lease by now."""


class ReconcileResult(NamedTuple):
    """What a step was, in sentences; and the workers, by role, that the pods have room for from then on."""

    notes: tuple[str, ...]
    num_workers: dict[str, int]


class RayClusterActuator:
    """An Actuator over `groups`."""

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        finder: ClusterFinder,
        patch: Patch,
        leadership: LeaseKeeper,
        leaving: PodDrain,
        serve: ServeActuator,
        retries: Retries,
    ) -> None:
        self._groups = groups
        self._finder = finder
        self._patch = patch
        self._leadership = leadership
        self._leaving = leaving
        self._serve = serve
        self._retries = retries

    @property
    def leads(self) -> bool:
        return self._leadership.leads

    async def starting(self, model: str, workers: Sequence[WorkerState]) -> dict[str, int]:
        """A pod counts as starting until its worker is registered; one that leaves has still its worker."""
        found = await self._serve.starting(model, workers)
        cluster = await self._retries.of(lambda: asyncio.to_thread(self._finder.read))
        there = Counter(worker.pool for worker in workers if worker.model == model)
        for group in self._groups:
            num_pods = cluster.groups[group.role].replicas - group.num_spare
            found[group.role] = max(0, num_pods * group.num_workers - there[group.role])
        return found

    async def carry_out(
        self, model: str, decision: Decision, workers: Sequence[WorkerState], starting: Mapping[str, int]
    ) -> ActuationResult:
        mine = [worker for worker in workers if worker.model == model]
        replicas, changed = wanted(decision, mine, starting, self._serve.most)
        try:
            settled = await self._retries.of(lambda: self._settle(replicas, workers))
        except NotLeading:
            return ActuationResult("standby", {}, (f"{self._leadership.holder or 'nobody'} leads, not this planner",))
        there = Counter(worker.pool for worker in mine)
        # Nor fewer than are registered: Serve may hear of a pod's end later than we do.
        held = {role: max(number, there[role]) for role, number in settled.num_workers.items()}
        told = {role: max(number, held.get(role, 0)) for role, number in replicas.items()}
        holder = await self._serve.say(model, told, decision.reasons)
        heard = () if self._serve.leads else (f"Serve still listens to planner {holder}",)
        return ActuationResult(
            "carried_out", replicas, (*settled.notes, *heard, *await self._serve.change_roles(changed))
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._finder.close)
        await self._serve.close()

    # ---- inside

    async def _settle(self, replicas: Mapping[str, int], workers: Sequence[WorkerState]) -> ReconcileResult:
        """One look at the cluster, and one step towards that many. Raises KubeError."""
        self._require_lead()
        cluster = await asyncio.to_thread(self._finder.read)
        pods = await asyncio.to_thread(self._finder.pods, cluster)
        await self._leaving.ask((), pods, workers)
        steps = await self._steps(cluster, replicas, pods, workers)
        if any(step.replicas < view.replicas for view, step in steps):
            # A pod that died unseen was made anew: one more would go than is named, and KubeRay would choose it.
            pods = await asyncio.to_thread(self._finder.pods_now, cluster)
            steps = await self._steps(cluster, replicas, pods, workers)
        operations = [part for view, step in steps if step.changes(view) for part in step.operations(view)]
        if operations:
            self._require_lead()
            # Only on what was read: a conflict has all of it looked at again.
            only_on = {"op": "replace", "path": "/metadata/resourceVersion", "value": cluster.version}
            await asyncio.to_thread(self._patch, cluster.name, [*operations, only_on])
        there = {pod.name for pod in pods}
        held = {
            group.role: _num_workers(group, step, there) for group, (_, step) in zip(self._groups, steps, strict=True)
        }
        return ReconcileResult(tuple(reason for _, step in steps for reason in step.reasons), held)

    async def _steps(
        self, cluster: Cluster, replicas: Mapping[str, int], pods: Sequence[Pod], workers: Sequence[WorkerState]
    ) -> list[tuple[GroupView, GroupPatch]]:
        return [await self._step(cluster, group, replicas[group.role], pods, workers) for group in self._groups]

    async def _step(
        self, cluster: Cluster, group: WorkerGroup, number: int, pods: Sequence[Pod], workers: Sequence[WorkerState]
    ) -> tuple[GroupView, GroupPatch]:
        """Those that are asked to leave may have nothing left at once."""
        view, wanted = cluster.groups[group.role], math.ceil(number / group.num_workers) + group.num_spare
        step = self._next(view, pods, workers, wanted, group.num_spare)
        if not step.leave:
            return view, step
        self._require_lead()
        await self._leaving.ask(step.leave, pods, workers)
        return view, self._next(view, pods, workers, wanted, group.num_spare).after(step)

    def _next(
        self, view: GroupView, pods: Sequence[Pod], workers: Sequence[WorkerState], wanted: int, num_spare: int
    ) -> GroupPatch:
        seen = self._leaving.look(pods, workers)
        inside = [seen[pod.name] for pod in pods if pod.group == view.name and pod.name in seen]
        return next_step(view, inside, wanted, num_spare)

    def _require_lead(self) -> None:
        if not self._leadership.leads:
            raise NotLeading


def _num_workers(group: WorkerGroup, step: GroupPatch, there: Collection[str]) -> int:
    """A pod that is to be deleted has its workers until it is gone, beside the ones that the group asks for."""
    num_pods = step.replicas + sum(name in there for name in step.listed)
    return max(0, num_pods - group.num_spare) * group.num_workers


class Retries:
    """Tries again what failed for a while only, from its beginning. `failed` hears of each failure; `wait` takes
    seconds."""

    def __init__(
        self,
        backoff: Backoff,
        failed: Callable[[KubeError], None],
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._backoff = backoff
        self._failed = failed
        self._wait = wait

    async def of(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Raises ActuatorFailed when it has failed too often, or for good."""
        self._backoff.worked()
        for number in range(1, TRIES + 1):
            try:
                return await attempt()
            except KubeError as error:
                self._failed(error)
                if number == TRIES or not (error.is_conflict or error.is_transient):
                    raise ActuatorFailed(f"the API server: {error}") from error
                await self._wait(self._backoff.failed(error.retry_after_s))
        raise AssertionError("unreachable")
