"""Finds the RayCluster that is planned, its worker groups and their pods; never changes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.core.ray_worker_groups import WorkerGroup
from tandem.planner.actuator import ActuatorFailed
from tandem.planner.pod_watch import Pod, PodInformer
from tandem.planner.worker_group import GroupView

FIRST_LIST_S = 5.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """As it was read: `version` is its resourceVersion; `groups` by role."""

    name: str
    version: str
    groups: Mapping[str, GroupView]


class Objects(Protocol):
    """As `kube.KubeApi`. Methods block and raise KubeError."""

    def read_cluster(self, name: str) -> dict[str, Any]: ...

    def read_service(self, name: str) -> dict[str, Any]: ...

    def list_pods(self, selector: str) -> tuple[list[Pod], str]: ...


class ClusterFinder:
    """Of a RayService or, where that has no name, of a RayCluster by itself. `watch` makes the watch of the pods that a
    label selector names."""

    def __init__(
        self,
        objects: Objects,
        rayservice: str,
        raycluster: str,
        groups: Sequence[WorkerGroup],
        watch: Callable[[str], PodInformer],
    ) -> None:
        self._objects = objects
        self._rayservice = rayservice
        self._raycluster = raycluster
        self._groups = groups
        self._make_watch = watch
        self._watch: PodInformer | None = None

    def read(self) -> Cluster:
        """Blocks. Raises KubeError, and ActuatorFailed for a cluster that is not to be planned as it is."""
        name = self._active() if self._rayservice else self._raycluster
        told = self._objects.read_cluster(name)
        spec = told.get("spec", {})
        if spec.get("enableInTreeAutoscaling"):
            raise ActuatorFailed(
                f"RayCluster {name} has Ray's autoscaler on, which is to be its only writer: set planner.actuator=serve"
            )
        if spec.get("suspend"):
            raise ActuatorFailed(f"RayCluster {name} is suspended")
        groups = {group.role: self._group(told, name, group.name) for group in self._groups}
        return Cluster(name, str(told["metadata"]["resourceVersion"]), groups)

    def pods(self, cluster: Cluster) -> tuple[Pod, ...]:
        """Blocks for a first list. Raises ActuatorFailed."""
        selector = _selector(cluster)
        if self._watch is None or self._watch.selector != selector:
            self.close()
            self._watch = self._make_watch(selector)
            self._watch.start()
        pods = self._watch.pods(FIRST_LIST_S)
        if pods is None:
            raise ActuatorFailed(f"RayCluster {cluster.name}: {self._watch.problem or 'its watch is silent'}")
        return pods

    def pods_now(self, cluster: Cluster) -> tuple[Pod, ...]:
        """Those that are there, where `pods` may lag behind. Blocks. Raises KubeError."""
        return tuple(sorted(self._objects.list_pods(_selector(cluster))[0]))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _active(self) -> str:
        status = self._objects.read_service(self._rayservice).get("status", {})
        active, pending = (
            str(status.get(which, {}).get("rayClusterName") or "")
            for which in ("activeServiceStatus", "pendingServiceStatus")
        )
        if not active:
            raise ActuatorFailed(f"RayService {self._rayservice} has no cluster that serves yet")
        if pending and pending != active:
            raise ActuatorFailed(
                f"RayService {self._rayservice} goes over from RayCluster {active} to {pending}: both stay as they are"
            )
        return active

    def _group(self, told: dict[str, Any], cluster: str, name: str) -> GroupView:
        group = GroupView.of(told, name)
        if group is None:
            raise ActuatorFailed(f"RayCluster {cluster} has no worker group {name} (planner.groups)")
        if group.num_hosts > 1:
            raise ActuatorFailed(f"group {name} has {group.num_hosts} hosts for each replica, which is not planned")
        if group.is_suspended:
            raise ActuatorFailed(f"group {name} is suspended")
        return group


def _selector(cluster: Cluster) -> str:
    return f"ray.io/cluster={cluster.name}"
