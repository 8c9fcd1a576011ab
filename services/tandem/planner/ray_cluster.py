"""Find the RayCluster to scale, its worker groups and their pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.core.ray_worker_groups import WorkerGroup
from tandem.planner.actuator import ActuatorFailed
from tandem.planner.pod_watch import Pod, PodInformer
from tandem.planner.worker_group import GroupView

if TYPE_CHECKING:
    from tandem.planner.kube_client import KubeApi

FIRST_LIST_S = 5.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A RayCluster as it was read from the API server.

    `version`: its resourceVersion. `groups`: the worker groups that the planner scales, by role."""

    name: str
    version: str
    groups: Mapping[str, GroupView]


@dataclass(slots=True, eq=False)
class ClusterFinder:
    """Finds and reads the RayCluster to scale, and its pods.

    The cluster is the active one of the RayService `rayservice`, or if that is empty the RayCluster `raycluster`.
    `groups`: the worker groups to scale, with their roles. `make_watch`: builds the informer of the pods that a label
    selector matches; the informer is started on first use and ended by `close`."""

    api: KubeApi
    rayservice: str
    raycluster: str
    groups: Sequence[WorkerGroup]
    make_watch: Callable[[str], PodInformer]
    _watch: PodInformer | None = field(default=None, init=False)

    def read(self) -> Cluster:
        """Read the cluster from the API server. Blocks.

        Raises KubeError, and ActuatorFailed for a cluster that must not be scaled now: its own autoscaler is on, it or
        a group is suspended, a group is missing, or its RayService is changing to another cluster."""
        name = self._active() if self.rayservice else self.raycluster
        cluster_object = self.api.read_cluster(name)
        spec = cluster_object.get("spec", {})
        if spec.get("enableInTreeAutoscaling"):
            raise ActuatorFailed(
                f"RayCluster {name} has Ray's autoscaler on, which is to be its only writer: set planner.actuator=serve"
            )
        if spec.get("suspend"):
            raise ActuatorFailed(f"RayCluster {name} is suspended")
        groups = {group.role: self._group(cluster_object, name, group.name) for group in self.groups}
        return Cluster(name, str(cluster_object["metadata"]["resourceVersion"]), groups)

    def owner(self) -> Mapping[str, Any]:
        """Read the RayService, or without one the RayCluster, and return a reference to it for objects that are to end
        with it. Blocks. Raises KubeError."""
        found = self.api.read_service(self.rayservice) if self.rayservice else self.api.read_cluster(self.raycluster)
        metadata = found["metadata"]
        names = {"apiVersion": found["apiVersion"], "kind": found["kind"]}
        return {**names, "name": metadata["name"], "uid": metadata["uid"]}

    def pods(self, cluster: Cluster) -> tuple[Pod, ...]:
        """Return the cluster's pods, sorted by name, from the informer.

        Blocks for up to `FIRST_LIST_S` seconds until the informer's first list has arrived. Raises ActuatorFailed while
        the pods are not known."""
        selector = _selector(cluster)
        if self._watch is None or self._watch.selector != selector:
            self.close()
            self._watch = self.make_watch(selector)
            self._watch.start()
        pods = self._watch.pods(FIRST_LIST_S)
        if pods is None:
            raise ActuatorFailed(f"RayCluster {cluster.name}: {self._watch.problem or 'its watch is silent'}")
        return pods

    def pods_now(self, cluster: Cluster) -> tuple[Pod, ...]:
        """Return the cluster's pods, sorted by name, from the API server, because the informer may lag behind. Blocks.

        Raises KubeError."""
        return tuple(sorted(self.api.list_pods(_selector(cluster))[0]))

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _active(self) -> str:
        status = self.api.read_service(self.rayservice).get("status", {})
        active, pending = (
            str(status.get(which, {}).get("rayClusterName") or "")
            for which in ("activeServiceStatus", "pendingServiceStatus")
        )
        if not active:
            raise ActuatorFailed(f"RayService {self.rayservice} has no cluster that serves yet")
        if pending and pending != active:
            raise ActuatorFailed(
                f"RayService {self.rayservice} goes over from RayCluster {active} to {pending}: both stay as they are"
            )
        return active

    def _group(self, cluster_object: dict[str, Any], cluster: str, name: str) -> GroupView:
        group = GroupView.of(cluster_object, name)
        if group is None:
            raise ActuatorFailed(f"RayCluster {cluster} has no worker group {name} (planner.groups)")
        if group.num_hosts > 1:
            raise ActuatorFailed(f"group {name} has {group.num_hosts} hosts for each replica, which is not supported")
        if group.is_suspended:
            raise ActuatorFailed(f"group {name} is suspended")
        return group


def _selector(cluster: Cluster) -> str:
    return f"ray.io/cluster={cluster.name}"
