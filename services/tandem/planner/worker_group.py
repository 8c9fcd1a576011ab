"""The next step of one worker group towards so many pods; pure, and never takes it.

Fewer pods come in two steps. First the workers of those that are to go are asked to leave; only when nothing is left on
them do they go, by name, and the group's number falls by no more than that. KubeRay deletes pods of its own choice when
a group has more than its number: so it falls only while KubeRay has made exactly what the group asks for. More pods are
asked for at once, and those that still drain come on top: they take no work any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_LEAVE_SHARE = 4
"""At most a part of so many pods leave at once, and always one may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A worker group as its RayCluster has it; `index` is its place there, `listed` the pods that are to be deleted."""

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
        """None: there is no such group."""
        for index, spec in enumerate(cluster.get("spec", {}).get("workerGroupSpecs") or ()):
            if spec.get("groupName") == name:
                return cls(
                    index=index,
                    name=name,
                    replicas=int(spec.get("replicas") or 0),
                    least=int(spec.get("minReplicas") or 0),
                    most=int(spec.get("maxReplicas", 2**31 - 1)),
                    num_hosts=int(spec.get("numOfHosts") or 1),
                    is_suspended=bool(spec.get("suspend")),
                    listed=tuple((spec.get("scaleStrategy") or {}).get("workersToDelete") or ()),
                )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """`num_jobs`: of its workers; None: it has none that is registered. `is_empty`: all its workers were asked to leave
    and have nothing left. `is_unborn`: it was seen to appear and never had one; any other with none in sight may have
    one that serves. `is_lost`: it has been out of sight for long and does not answer. `is_ending`: it is being deleted,
    and KubeRay counts it until it is gone unless it is listed."""

    name: str
    num_jobs: int | None
    is_leaving: bool = False
    is_empty: bool = False
    is_unborn: bool = False
    is_lost: bool = False
    is_ending: bool = False

    @property
    def may_go(self) -> bool:
        return self.is_leaving and (self.is_empty or self.is_unborn or self.is_lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPatch:
    """`leave`: pods whose workers are to be asked to leave, now first. `replicas` and `listed` are what the group is to
    have; `reasons` in plain sentences."""

    replicas: int
    listed: tuple[str, ...]
    leave: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def after(self, first: GroupPatch) -> GroupPatch:
        """This step, when those whom the first one named have been asked; it names others in the next round only."""
        return replace(self, leave=first.leave, reasons=tuple(dict.fromkeys((*first.reasons, *self.reasons))))

    def changes(self, group: GroupView) -> bool:
        return self.replicas != group.replicas or not set(self.listed) <= set(group.listed)

    def operations(self, group: GroupView) -> list[dict[str, Any]]:
        """As a JSON Patch."""
        at = f"/spec/workerGroupSpecs/{group.index}"
        return [
            {"op": "test", "path": f"{at}/groupName", "value": group.name},
            {"op": "add", "path": f"{at}/replicas", "value": self.replicas},
            {"op": "add", "path": f"{at}/scaleStrategy", "value": {"workersToDelete": list(self.listed)}},
        ]


def next_step(group: GroupView, pods: Sequence[PodView], wanted: int, num_spare: int = 0) -> GroupPatch:
    """`pods` until they are gone; `wanted` of them, of which `num_spare` have no worker and stay so."""
    bounded = min(max(wanted, group.least), group.most)
    bound = f"group {group.name} may have {group.least} to {group.most} pods, not {wanted}"
    reasons: tuple[str, ...] = (bound,) if bounded != wanted else ()
    present = [pod for pod in pods if not pod.is_ending and pod.name not in group.listed]
    going = tuple(name for name in group.listed if any(pod.name == name for pod in pods))
    may_go = sorted(pod.name for pod in present if pod.may_go)
    draining = [pod for pod in present if pod.is_leaving and not pod.may_go]
    number = min(bounded + len(draining), group.most)
    if number >= group.replicas:
        # Who was to leave leaves all the same: a worker that drains takes no work any more. KubeRay makes new ones.
        grown = (f"group {group.name} grows from {group.replicas} to {number} pods",)
        reasons += (*(grown if number > group.replicas else ()), *_replaced(group, may_go), *_waiting(group, draining))
        return GroupPatch(replicas=number, listed=(*going, *may_go), reasons=reasons)
    if len(present) != group.replicas:
        told = f"group {group.name} does not shrink before KubeRay has made {len(present)} pods {group.replicas}"
        return GroupPatch(replicas=group.replicas, listed=group.listed, reasons=(*reasons, told))
    replicas = max(number, group.replicas - len(may_go))
    leave = _leavers(present, bounded, num_spare)
    return GroupPatch(
        replicas=replicas,
        listed=(*going, *may_go) if may_go else group.listed,
        leave=tuple(pod.name for pod in leave),
        reasons=(*reasons, *_shrinking(group, leave, may_go, replicas), *_waiting(group, draining)),
    )


def _leavers(present: Sequence[PodView], wanted: int, num_spare: int) -> list[PodView]:
    """Those that leave already count, and the spare ones do not. Who has no worker yet goes first, then
    who has least to do, last who is lost; one whose worker is out of sight may be at work, and stays."""
    leaving = [pod for pod in present if pod.is_leaving]
    staying = [pod for pod in present if not pod.is_leaving]
    room = max(1, len(present) // _LEAVE_SHARE) - len(leaving)
    number = max(0, min(len(staying) - wanted, room))
    order = sorted(staying, key=lambda pod: (pod.num_jobs or 0, pod.name))
    unborn = [pod for pod in order if pod.is_unborn]
    lost = [pod for pod in order if pod.is_lost][max(0, num_spare - len(unborn)) :]
    return [*unborn[num_spare:], *(pod for pod in order if pod.num_jobs is not None), *lost][:number]


def _replaced(group: GroupView, may_go: Sequence[str]) -> tuple[str, ...]:
    return (f"group {group.name} replaces {', '.join(may_go)}, which had been asked to leave",) if may_go else ()


def _shrinking(group: GroupView, leave: Sequence[PodView], may_go: Sequence[str], replicas: int) -> tuple[str, ...]:
    told: list[str] = []
    if may_go:
        told.append(f"group {group.name} goes from {group.replicas} to {replicas} pods without {', '.join(may_go)}")
    if leave:
        told.append(f"group {group.name}: {', '.join(pod.name for pod in leave)} are asked to leave")
    return tuple(told)


def _waiting(group: GroupView, draining: Sequence[PodView]) -> tuple[str, ...]:
    waits = ", ".join(f"{pod.name} ({pod.num_jobs} jobs)" for pod in draining)
    return (f"group {group.name} waits until nothing is left on {waits}",) if waits else ()
