"""Compute the next step of one worker group towards a number of pods.

Pods are removed in two steps. First the workers of the chosen pods are drained. Pods on which nothing is left are then
deleted by name, and `replicas` of the group falls by at most the number of these pods. If a group has more pods than
its `replicas`, KubeRay deletes pods of its own choice; so `replicas` falls only while KubeRay has made exactly as many
pods as the group requests. A group that must grow requests pods at once, in addition to its draining pods, which take
no work any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

_DRAIN_SHARE = 4
"""At most one pod in this many drains at the same time, and always at least the pods of one worker may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A worker group of a RayCluster, as it was read.

    `index`: its position in the RayCluster's list of groups. `replicas`: pods that it requests; where the number in the
    object is outside of `least` and `most`, the nearer of these, as KubeRay counts. `num_hosts`: pods for each replica.
    `listed`: names of its pods that are to be deleted (`workersToDelete`).
    """

    index: int
    name: str
    replicas: int
    least: int = 0
    most: int = 2**31 - 1
    num_hosts: int = 1
    is_suspended: bool = False
    listed: tuple[str, ...] = ()

    @classmethod
    def of(cls, cluster: dict[str, Any], name: str) -> GroupView | None:
        """Return the worker group `name` of a RayCluster object; None if it has no such group."""
        for index, spec in enumerate(cluster.get("spec", {}).get("workerGroupSpecs") or ()):
            if spec.get("groupName") == name:
                least, most = int(spec.get("minReplicas") or 0), int(spec.get("maxReplicas", 2**31 - 1))
                return cls(
                    index=index,
                    name=name,
                    replicas=min(max(int(spec.get("replicas") or 0), least), most),
                    least=least,
                    most=most,
                    num_hosts=int(spec.get("numOfHosts") or 1),
                    is_suspended=bool(spec.get("suspend")),
                    listed=tuple((spec.get("scaleStrategy") or {}).get("workersToDelete") or ()),
                )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """State of one pod, as far as it decides whether the pod may be deleted.

    - `num_jobs`: number of jobs on its workers; None if it has no registered worker.
    - `is_draining`: its workers were requested to drain. `is_empty`: nothing is left on its drained workers.
    - `is_starting`: it appeared while the planner was watching and has not had a worker yet. Any other pod without a
      registered worker may have a worker that serves.
    - `spanning_worker`: id of the worker that has ranks in this pod and in others; empty where there is none.
    - `is_lost`: its workers have not been registered for long and do not answer.
    - `is_ending`: it is being deleted; KubeRay counts it until it is gone, unless the group lists it for deletion."""

    name: str
    num_jobs: int | None
    is_draining: bool = False
    is_empty: bool = False
    is_starting: bool = False
    is_lost: bool = False
    is_ending: bool = False
    spanning_worker: str = ""

    @property
    def may_be_deleted(self) -> bool:
        return self.is_draining and (self.is_empty or self.is_starting or self.is_lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPatch:
    """The next change of a worker group.

    `replicas`: new number of pods that the group requests. `listed`: names of the pods that are to be deleted. `drain`:
    names of the pods whose workers are to be drained now. `reasons`: sentences for the report."""

    replicas: int
    listed: tuple[str, ...]
    drain: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def after(self, first: GroupPatch) -> GroupPatch:
        """Return this change with the pods to drain of `first` and with the reasons of both.

        `first`: the change that was computed before this one, and whose pods have been requested to drain since. Pods
        that only this change would drain wait for the next decision."""
        return replace(self, drain=first.drain, reasons=tuple(dict.fromkeys((*first.reasons, *self.reasons))))

    def changes(self, group: GroupView) -> bool:
        return self.replicas != group.replicas or not set(self.listed) <= set(group.listed)

    def unlists(self, group: GroupView) -> bool:
        """Return whether a pod that `group` lists for deletion is no longer listed after the change."""
        return self.changes(group) and not set(group.listed) <= set(self.listed)

    def operations(self, group: GroupView) -> list[dict[str, Any]]:
        """Return the change as operations of a JSON Patch (RFC 6902) of the RayCluster.

        The first operation tests that `group` is still at its position."""
        path = f"/spec/workerGroupSpecs/{group.index}"
        return [
            {"op": "test", "path": f"{path}/groupName", "value": group.name},
            {"op": "add", "path": f"{path}/replicas", "value": self.replicas},
            {"op": "add", "path": f"{path}/scaleStrategy", "value": {"workersToDelete": list(self.listed)}},
        ]


def next_step(
    group: GroupView, pods: Sequence[PodView], desired: int, num_spare: int = 0, num_pods: int = 1
) -> GroupPatch:
    """Compute the next change of a worker group towards `desired` pods, without I/O.

    `group`: the worker group as it was read. `pods`: all pods of the group, also those being deleted. `num_spare`: how
    many of the desired pods are to have no worker. `num_pods`: pods of each worker, which divides `desired`; of the
    group's bounds only multiples count. Pods are deleted only when they are drained and nothing is left on them, so a
    group may need several changes to shrink."""
    least, most = -(-group.least // num_pods) * num_pods, group.most // num_pods * num_pods
    bounded = min(max(desired, least), most)
    reasons: list[str] = []
    if bounded != desired:
        reasons.append(f"group {group.name} may have {least} to {most} pods, not {desired}")
    present = [pod for pod in pods if not pod.is_ending and pod.name not in group.listed]
    deleting = tuple(name for name in group.listed if any(pod.name == name for pod in pods))
    may_be_deleted = sorted(pod.name for pod in present if pod.may_be_deleted)
    deleted_names = ", ".join(may_be_deleted)
    still_draining = [pod for pod in present if pod.is_draining and not pod.may_be_deleted]
    number = min(bounded + len(still_draining), most)
    drain: list[PodView] = []
    if number >= group.replicas:
        # Draining pods are deleted all the same, because a draining worker takes no work any more. KubeRay makes new
        # ones.
        replicas, listed = number, (*deleting, *may_be_deleted)
        if number > group.replicas:
            reasons.append(f"group {group.name} grows from {group.replicas} to {number} pods")
        if may_be_deleted:
            reasons.append(f"group {group.name} replaces {deleted_names}, which were draining")
    elif len(present) != group.replicas:
        reasons.append(
            f"group {group.name} does not shrink before KubeRay has made {len(present)} pods {group.replicas}"
        )
        return GroupPatch(replicas=group.replicas, listed=group.listed, reasons=tuple(reasons))
    else:
        replicas = max(number, group.replicas - len(may_be_deleted))
        listed = (*deleting, *may_be_deleted) if may_be_deleted else group.listed
        drain = _pods_to_drain(present, bounded, num_spare, num_pods)
        if may_be_deleted:
            reasons.append(f"group {group.name} goes from {group.replicas} to {replicas} pods without {deleted_names}")
        if drain:
            reasons.append(f"group {group.name}: {', '.join(pod.name for pod in drain)} start draining")
    waits = ", ".join(f"{pod.name} ({pod.num_jobs} jobs)" for pod in still_draining)
    if waits:
        reasons.append(f"group {group.name} waits until nothing is left on {waits}")
    drain_names = tuple(pod.name for pod in drain)
    return GroupPatch(replicas=replicas, listed=listed, drain=drain_names, reasons=tuple(reasons))


def _pods_to_drain(present: Sequence[PodView], desired: int, num_spare: int, num_pods: int) -> list[PodView]:
    """Choose the pods to drain next. Pods that drain already count towards the number; `num_spare` pods do not.

    Chosen first are pods without a worker yet, then those with the fewest jobs, then lost ones. A pod whose worker is
    not registered, but not lost, stays, because the worker may be at work. The pods of a worker that has `num_pods` of
    them are chosen together or not at all.
    """
    draining = [pod for pod in present if pod.is_draining]
    staying = sorted((pod for pod in present if not pod.is_draining), key=lambda pod: (pod.num_jobs or 0, pod.name))
    room = max(num_pods, len(present) // _DRAIN_SHARE) - len(draining)
    number = max(0, min(len(staying) - desired, room))
    starting = [pod for pod in staying if pod.is_starting]
    unneeded = starting[num_spare:]
    units = [unneeded[first : first + num_pods] for first in range(0, len(unneeded), num_pods)]
    units += _by_worker(pod for pod in staying if pod.num_jobs is not None)
    units += _by_worker(pod for pod in staying if pod.is_lost)[max(0, num_spare - len(starting)) :]
    chosen: list[PodView] = []
    for unit in units:
        if len(chosen) + len(unit) <= number:
            chosen += unit
    return chosen


def _by_worker(pods: Iterable[PodView]) -> list[list[PodView]]:
    """Return the pods in their order, those of a worker that has several pods together at the place of the first."""
    groups: dict[str, list[PodView]] = {}
    for pod in pods:
        groups.setdefault(pod.spanning_worker or pod.name, []).append(pod)
    return list(groups.values())
