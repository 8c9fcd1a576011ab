"""Test two `tandem planner` programs on one RayCluster, whose workers only report their state: one acts, and when it is
killed the other does.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.ids import GatewayId, Incarnation, WorkerId, WorkerRef
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.scaling.demand_totals import DemandTotals
from tandem.stores.demand_store import DemandRecord, DemandStore
from tandem.stores.replica_targets import ReplicaTargets
from tandem.stores.worker_registry import WorkerRecord, WorkerRegistry
from tandem.wire.gen import kv_pb2, worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.wire.kv_codec import encode_worker
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.worker_codec import encode_load, encode_step_cost
from tests.e2e.cluster import Program
from tests.unit.planner.api_servers import ApiServer
from tests.unit.planner.rig import eventually
from tests.unit.planner.world import CLUSTER, GROUPS, Objects, World

LEASE_S = 3.0
NAMESPACE = "two-planners"


class Worker(WorkerServicer):
    """Report a fixed state, and be empty as soon as it is drained."""

    def __init__(self, name: str, pool: str, host: str) -> None:
        self.ref = WorkerRef(WorkerId(name), Incarnation(1), f"{host}:0")
        self.pool = pool
        self.is_draining = False
        self._server = PeerAuth(name).server(self.ref.incarnation)
        add_WorkerServicer_to_server(self, self._server)
        port = PeerAuth(name).listen(self._server, self.ref.address)
        self.ref = WorkerRef(self.ref.id, self.ref.incarnation, f"{host}:{port}")

    async def start(self, registry: WorkerRegistry) -> None:
        await self._server.start()
        record = WorkerRecord(
            worker=self.ref, pool=self.pool, model="m", fingerprint="", layout="", max_model_len=64, bundle_digest=""
        )
        await registry.publish(record)

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeReply:
        load = WorkerLoad(num_blocks=64, num_free_blocks=64, draining=self.is_draining)
        transport = kv_pb2.TransportPeer(layout=kv_pb2.KVLayout(block_size=16))
        return worker_pb2.DescribeReply(
            worker=encode_worker(self.ref),
            load=encode_load(load),
            step_cost=encode_step_cost(StepCost(0.01, 1e-5, 1e-4, 1e-7, 1e-9)),
            transport=transport,
        )

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainReply:
        self.is_draining = True
        return worker_pb2.DrainReply()


@pytest.fixture
def world(api_server: ApiServer) -> Iterator[World[Objects]]:
    made = World(api_server.objects, network="127.1")
    made.create(1, 1)
    yield made
    assert made.violations == []


@pytest.fixture
async def workers(world: World[Objects], redis_url: str) -> AsyncIterator[list[Worker]]:
    """Register one worker in each pod, and a gateway without requests."""
    registry = WorkerRegistry(redis_url, NAMESPACE, ttl_s=600.0)
    board = DemandStore(redis_url, NAMESPACE, ttl_s=600.0)
    await board.publish(DemandRecord(gateway=GatewayId("g"), totals={"m": DemandTotals()}))
    made = []
    for pool, group in GROUPS.items():
        (pod,) = world.pods(group)
        made.append(Worker(f"{pool}-0", pool, world.api.get("pods", pod)["status"]["podIP"]))
        await made[-1].start(registry)
    yield made
    for worker in made:
        await worker.stop()
    await registry.close()
    await board.close()


@pytest.fixture
def start(
    api_server: ApiServer, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Program]]:
    kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setitem(os.environ, "KUBECONFIG", str(kubeconfig))
    begun: list[Program] = []

    def planner(name: str, *arguments: str) -> Program:
        groups = ",".join(f"{role}={group}" for role, group in GROUPS.items())
        program = Program(
            tmp_path, name, "planner", "--redis-url", redis_url, "--namespace", NAMESPACE, "--mode", "act", "--json",
            "--actuator", "raycluster", "--raycluster", CLUSTER, "--groups", groups, "--interval-s", "0.5",
            "--kubernetes-namespace", api_server.namespace, "--planner-lease-s", str(LEASE_S), *arguments,
        )  # fmt: skip
        begun.append(program)
        return program

    yield planner
    for program in begun:
        program.stop()


def first_plan(program: Program) -> dict[str, Any]:
    """Return the first plan that was decided."""
    out = program._process.stdout
    assert out is not None
    while True:
        plan: dict[str, Any] = json.loads(out.readline())
        if "target" in plan:
            return plan


@pytest.mark.nightly
async def test_one_acts_and_when_it_is_killed_the_other_does(
    world: World[Objects], workers: list[Worker], start: Callable[..., Program], redis_url: str
) -> None:
    def holder() -> str:
        name: str = world.api.get("leases", "tandem-planner")["spec"]["holderIdentity"]
        return name

    first = start("first", "--min-decode", "3")
    await asyncio.to_thread(first.wait_ready)  # the workers answer meanwhile
    await eventually(lambda: world.replicas() == (1, 3))
    assert holder() == first.ready["planner"]
    second = start("second", "--min-decode", "4")
    await asyncio.to_thread(second.wait_ready)
    plan = await asyncio.to_thread(first_plan, second)
    assert plan["outcome"] == "standby" and not plan["leads"], plan
    health = await asyncio.to_thread(httpx.get, f"http://{second.ready['metrics']}/health", trust_env=False)
    assert health.status_code == 200, "a planner that waits is well"
    assert holder() == first.ready["planner"] and world.replicas() == (1, 3)

    await asyncio.to_thread(first.kill)
    await eventually(lambda: world.replicas() == (1, 4))
    assert holder() == second.ready["planner"]
    targets = ReplicaTargets(redis_url, NAMESPACE)
    assert await asyncio.to_thread(second.stop) == 0
    assert holder() == "", "left to the next one at once"
    target = await targets.read("m")
    assert target is not None and target.replicas["decode"] >= 3
    await targets.close()
