"""Simulate a cluster around an API server: KubeRay creates and deletes pods, workers start and end in them, and every
action on a worker is recorded. The server is the double or a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.worker_load import WorkerLoad
from tandem.scaling.worker_state import WorkerState
from tests.unit.planner.kube_server import Object

CLUSTER, SERVICE = "llm-raycluster-x1", "llm"
GROUPS = {"prefill": "prefill-group", "decode": "decode-group"}
NOT_KUBERAY = "kueue.x-k8s.io/multikueue"
"""Value of `managedBy` with which an operator of KubeRay, where one runs, leaves an object alone."""


class Objects(Protocol):
    """What the simulated cluster does to the objects of an API server, as KubeServer does.

    `wrote` is called only by a server that can tell who wrote."""

    wrote: Callable[[str, Object | None, Object], None]

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def put(self, plural: str, name: str, content: Object) -> Object: ...

    def delete(self, plural: str, name: str) -> None: ...

    def get(self, plural: str, name: str) -> Object: ...

    def names(self, plural: str) -> list[str]: ...


ObjectsT = TypeVar("ObjectsT", bound=Objects)


class Tick:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at


@dataclass
class Worker:
    """Simulated worker. `num_jobs` run on it, one of which ends at each step. `pods`: the pods of its ranks."""

    state: WorkerState
    num_jobs: int
    pods: tuple[str, ...]
    is_draining: bool = False


@dataclass
class World(Generic[ObjectsT]):
    """Simulated cluster. `violations` must stay empty. A pod can have a worker `start` steps after it was created, and
    is present for `grace` steps after it was deleted. `pods_of_worker`: pods of each worker of a group, by the group's
    name, 1 by default. `workers`: by the name of their first pod. `silent`: workers that do not answer."""

    api: ObjectsT
    clock: Tick = field(default_factory=Tick)
    start: int = 2
    jobs: int = 3
    grace: int = 2
    violations: list[str] = field(default_factory=list)
    workers: dict[str, Worker] = field(default_factory=dict)
    published: list[dict[str, int]] = field(default_factory=list)
    roles: list[tuple[str, str]] = field(default_factory=list)
    holder: str = ""
    number: int = 0
    network: str = "10.0"
    ages: dict[str, int] = field(default_factory=dict)
    ending: dict[str, int] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    pods_of_worker: dict[str, int] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.api.wrote = self._wrote

    # ---- set-up

    def create(self, prefill: int = 1, decode: int = 1, **spec: Any) -> None:
        groups = [_group(GROUPS[role], number) for role, number in (("prefill", prefill), ("decode", decode))]
        head = {"rayStartParams": {}, "template": _template()}
        content = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {"name": CLUSTER},
            "spec": {
                "rayVersion": "2.60.0",
                "managedBy": NOT_KUBERAY,
                "headGroupSpec": head,
                "workerGroupSpecs": groups,
                **spec,
            },
        }
        self.api.put("rayclusters", CLUSTER, content)
        self.set_service(activeServiceStatus={"rayClusterName": CLUSTER})
        for _ in range(self.start + 1):
            self.step()

    def set_service(self, **status: Any) -> None:
        """Write the RayService with a new status."""
        content = {
            "apiVersion": "ray.io/v1",
            "kind": "RayService",
            "metadata": {"name": SERVICE},
            "spec": {
                "managedBy": NOT_KUBERAY,
                "rayClusterConfig": {"headGroupSpec": {"rayStartParams": {}, "template": _template()}},
            },
            "status": status,
        }
        self.api.put("rayservices", SERVICE, content)

    # ---- what goes on by itself

    def step(self, seconds: float = 5.0) -> None:
        """Let KubeRay reconcile, workers start and jobs end."""
        self.clock.at += seconds
        for worker in self.workers.values():
            worker.num_jobs = max(0, worker.num_jobs - 1) if worker.is_draining else self.jobs
        for name in [name for name, left in self.ending.items() if not left]:
            self.lose(name)
        self.ending = {name: left - 1 for name, left in self.ending.items()}
        self.reconcile()
        for name in self.pods():
            self.ages[name] = self.ages.get(name, 0) + 1
        taken = {pod for worker in self.workers.values() for pod in worker.pods}
        for group in GROUPS.values():
            free = [
                name
                for name in self.pods(group)
                if self.ages[name] > self.start and name not in taken and name not in self.ending
            ]
            num_pods = self.pods_of_worker.get(group, 1)
            for first in range(0, len(free) - num_pods + 1, num_pods):
                self.workers[free[first]] = self._worker(*free[first : first + num_pods])

    def reconcile(self) -> None:
        """Act as KubeRay's operator does after a restart: delete the named pods first, then create missing pods or
        delete excess ones at random. A terminating pod counts unless it is named."""
        with self.api.lock:
            for spec in self.api.get("rayclusters", CLUSTER)["spec"]["workerGroupSpecs"]:
                named = spec.get("scaleStrategy", {}).get("workersToDelete", ())
                for name in {*named} & {*self.pods()}:
                    self.end(name)
                there = [name for name in self.pods(spec["groupName"]) if name not in named]
                there.sort(key=lambda name: name not in self.ending)
                for name in there[spec["replicas"] :]:
                    self.violations.append(f"{name} was deleted at random")
                    self.end(name)
                for _ in range(spec["replicas"] - len(there)):
                    self._make(spec["groupName"])

    def pods(self, group: str = "") -> list[str]:
        return [
            name
            for name in self.api.names("pods")
            if not group or self.api.get("pods", name)["metadata"]["labels"]["ray.io/group"] == group
        ]

    def states(self) -> list[WorkerState]:
        """Return the states of the registered workers."""
        return [self._state(worker) for name, worker in self.workers.items() if name not in self.hidden]

    def replicas(self) -> tuple[int, int]:
        """Return the replicas of the prefill and of the decode group."""
        specs = self.api.get("rayclusters", CLUSTER)["spec"]["workerGroupSpecs"]
        return specs[0]["replicas"], specs[1]["replicas"]

    def num_serving(self, group: str) -> int:
        return sum(not w.is_draining for name, w in self.workers.items() if name in self.pods(group))

    # ---- what the planner asks of it, as Census and Targets

    async def drain(self, workers: Sequence[WorkerState]) -> dict[WorkerRef, int | None]:
        found: dict[WorkerRef, int | None] = {}
        for state in workers:
            worker = self.workers.get(state.ref.id)
            found[state.ref] = None if worker is None else worker.num_jobs
            if worker is not None:
                worker.is_draining = True
        return found

    async def set_role(self, worker: WorkerState, role: str) -> bool:
        self.roles.append((worker.ref.id, role))
        return True

    @property
    def census(self) -> Any:
        return SimpleNamespace(drain=self.drain, set_role=self.set_role)

    # ---- inside

    def _make(self, group: str) -> None:
        self.number += 1
        labels = {"ray.io/cluster": CLUSTER, "ray.io/group": group}
        status = {
            "podIP": f"{self.network}.{self.number // 250}.{self.number % 250 + 1}",
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        name = f"{CLUSTER}-{group}-{self.number:04d}"
        self.api.put("pods", name, {"metadata": {"labels": labels}, "status": status, **_template()})

    def end(self, name: str) -> None:
        """Delete a pod, which ends after its grace time."""
        if name not in self.ending:
            self.ending[name] = self.grace
            pod = self.api.get("pods", name)
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.api.put("pods", name, pod)

    def lose(self, name: str) -> None:
        """Remove a pod at once, with what is in it."""
        self.api.delete("pods", name)
        self.ending.pop(name, None)
        self.workers = {first: worker for first, worker in self.workers.items() if name not in worker.pods}

    def _worker(self, *names: str) -> Worker:
        pods = [self.api.get("pods", name) for name in names]
        role = next(role for role, group in GROUPS.items() if group == pods[0]["metadata"]["labels"]["ray.io/group"])
        hosts = tuple(str(pod["status"]["podIP"]) for pod in pods)
        ref = WorkerRef(WorkerId(names[0]), Incarnation(1), f"{hosts[0]}:9000")
        return Worker(WorkerState(ref=ref, model="m", pool=role, role=role, hosts=hosts), self.jobs, names)

    def _state(self, worker: Worker) -> WorkerState:
        load = WorkerLoad(num_running=worker.num_jobs, num_blocks=64, draining=worker.is_draining)
        if worker.state.ref.id in self.silent:
            return replace(worker.state, hosts=(), problem="it does not answer")
        return replace(worker.state, load=load)

    def _wrote(self, who: str, before: Object | None, after: Object) -> None:
        if after.get("kind") == "Lease":
            self.holder = after["spec"]["holderIdentity"]
            return
        assert before is not None
        if who != self.holder:
            self.violations.append(f"{who} wrote while {self.holder or 'nobody'} has the lease")
        for old, new in zip(before["spec"]["workerGroupSpecs"], after["spec"]["workerGroupSpecs"], strict=True):
            self._lowered(old, new)

    def _lowered(self, old: Object, new: Object) -> None:
        listed, fresh = ({*group.get("scaleStrategy", {}).get("workersToDelete", ())} for group in (old, new))
        for name in fresh - listed:
            worker = next((worker for worker in self.workers.values() if name in worker.pods), None)
            if worker is not None and (worker.num_jobs or not worker.is_draining):
                self.violations.append(f"{name} is to be deleted with {worker.num_jobs} jobs")
        if old["replicas"] - new["replicas"] > len(fresh - listed):
            self.violations.append(f"from {old['replicas']} to {new['replicas']} without naming who goes")
        kept = listed & {*self.pods()}
        if not kept <= fresh:
            self.violations.append(f"{kept - fresh} were to be deleted and are not any more")


def _group(name: str, replicas: int) -> Object:
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": 1,
        "maxReplicas": 20,
        "rayStartParams": {},
        "template": _template(),
    }


def _template() -> Object:
    """Return a pod that no scheduler takes."""
    containers = [{"name": "ray", "image": "tandem-worker:0.1.0"}]
    return {"spec": {"schedulerName": "none", "containers": containers}}
