"""Build the planner program and run it until a signal, or for one decision."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any

from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import PlannerId
from tandem.core.ray_worker_groups import read_groups
from tandem.obs.logs.logging_setup import set_up_logging
from tandem.obs.metrics.metrics_server import MetricsEndpoint
from tandem.obs.telemetry import Telemetry
from tandem.planner.actuator import Actuator
from tandem.planner.kube_error import Backoff, KubeError
from tandem.planner.leader_election import Election
from tandem.planner.lease_keeper import LeaseKeeper
from tandem.planner.plan_report import PlanReport
from tandem.planner.planner_loop import Loop, Planner
from tandem.planner.planner_metrics import PlannerMetrics
from tandem.planner.pod_drain import PodDrain
from tandem.planner.pod_watch import PodInformer
from tandem.planner.ray_cluster import ClusterFinder
from tandem.planner.raycluster_actuator import RayClusterActuator, Retries
from tandem.planner.serve_actuator import ServeActuator
from tandem.planner.worker_inventory import WorkerInventory
from tandem.scaling.scaler import Scaler
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.stores.demand_store import DemandStore
from tandem.stores.redis_client import RedisHealth
from tandem.stores.replica_targets import ReplicaTargets
from tandem.stores.worker_registry import WorkerRegistry
from tandem.wire.peer_auth import PeerAuth

FLUSH_S = 2.0
"""Longest time that stopping waits for traces and metrics to be sent."""
INTERVALS_HELD = 3
"""Number of consecutive decisions that may fail before Serve accepts the targets of another planner."""


class Program:
    """Connect the parts of one planner program: stores, actuator, decision loop, Lease and metrics endpoint.

    To run until a signal, call `listen`, then `run`, then `stop`. For a single decision, call `claim`, then
    `loop.once`, then `stop`. `me`: name of this planner, under which it holds the Lease and publishes targets.
    `on_plan` is called with the report of each decision. Raises TandemError if a Kubernetes cluster is to be scaled and
    there is no access to it."""

    def __init__(self, config: Config, me: PlannerId, on_plan: Callable[[PlanReport], None]) -> None:
        self._config = config
        self._me = me
        self._clock: Clock = SystemClock()
        self._health = RedisHealth()
        self._telemetry = Telemetry.start("tandem-planner", me, config.telemetry.max_values)
        redis, trust = config.redis, PeerAuth.of(me, config.cluster)
        self._demand_store = DemandStore(redis.url, redis.namespace, health=self._health)
        self._inventory = WorkerInventory(
            WorkerRegistry(redis.url, redis.namespace, health=self._health), trust, config
        )
        self._leadership: LeaseKeeper | None = None
        self._api: Any = None
        self._metrics = PlannerMetrics(self._telemetry.metrics, lambda: self.actuator.leads)
        self.actuator: Actuator = self._actuator()
        scaler = Scaler(config.planner, LatencyTargets.of(config.slo).interactive)
        planner = Planner(
            config.planner, self._demand_store, self._inventory, scaler, self.actuator, self._clock,
            own_model=config.model.served_names[0],
        )  # fmt: skip
        self.loop = Loop(planner, config.planner.interval_s, self._metrics, self._telemetry.tracer, on_plan)
        self.endpoint = MetricsEndpoint(config.planner.host, config.planner.metrics_port, self._telemetry.exposition)

    def listen(self) -> None:
        """Open the metrics endpoint, unless the settings turn it off. Raises OSError if its port is taken."""
        if self._config.planner.metrics_port >= 0:
            self.endpoint.start()

    async def run(self, stopped: asyncio.Event) -> None:
        """Make a decision every interval until `stopped` is set. If decisions are to be applied under a Kubernetes
        Lease, keep trying to hold it meanwhile.

        While another planner leads, decisions are made and reported but not applied. A decision that fails is logged.
        """
        async with asyncio.TaskGroup() as tasks:
            if self._leadership is not None and self._config.planner.mode == "act":
                tasks.create_task(self._leadership.run(stopped), name="leadership")
            tasks.create_task(self.loop.run(stopped), name="planner")

    async def claim(self) -> None:
        """Try once to take or renew the Kubernetes Lease that makes this planner the leader, because only a leader's
        decision is applied.

        Does nothing if the planner's mode is explain or its actuator uses no Lease. Does not wait for a Lease that
        another planner holds. A failure is logged, not raised."""
        if self._leadership is not None and self._config.planner.mode == "act":
            await asyncio.to_thread(self._leadership.look)

    async def stop(self) -> None:
        """Give up the Lease if this planner holds it, close the metrics endpoint and all connections, and send the last
        traces and metrics, for at most `FLUSH_S` seconds."""
        if self._leadership is not None:
            await asyncio.to_thread(self._leadership.resign)
        await self.actuator.close()
        await self._inventory.close()
        await self._demand_store.close()
        self.endpoint.close()
        if self._api is not None:
            self._api.close()
        await asyncio.to_thread(self._telemetry.close, FLUSH_S)

    # ---- composition

    def _actuator(self) -> Actuator:
        planner, redis = self._config.planner, self._config.redis
        hold_s = max(15.0, INTERVALS_HELD * planner.interval_s)
        targets = ReplicaTargets(redis.url, redis.namespace, hold_s=hold_s, health=self._health)
        minimums = {"prefill": planner.min_prefill, "decode": planner.min_decode}
        serve = ServeActuator(self._me, targets, self._inventory, minimums)
        return serve if planner.actuator == "serve" else self._raycluster(serve)

    def _raycluster(self, serve: ServeActuator) -> RayClusterActuator:
        planner, metrics = self._config.planner, self._metrics
        groups = read_groups(planner.groups) or ()
        election = Election(self._me, planner.lease_s)
        try:
            # Imported on use: the Serve actuator needs no Kubernetes client.
            kube = import_module("tandem.planner.kube_client")
            api = kube.connect(planner.kubernetes_namespace, self._me, election.request_s / 2)
        except KubeError as error:
            raise TandemError(ErrorKind.INVALID_REQUEST, f"Kubernetes: {error.message}", param="planner") from error
        self._api = api

        def watch(selector: str) -> PodInformer:
            return PodInformer(api, selector, self._clock, Backoff(_random))

        finder = ClusterFinder(api, planner.rayservice, planner.raycluster, groups, watch)
        self._leadership = LeaseKeeper(election, api, planner.lease, self._clock, finder.owner, metrics.failed)
        spanning = [group.name for group in groups if group.num_pods > 1]
        pod_drain = PodDrain(self._inventory, self._clock, spanning)
        retries = Retries(Backoff(_random), metrics.failed)
        return RayClusterActuator(finder, self._leadership, pod_drain, serve, retries)


def _random() -> float:
    return secrets.randbelow(1 << 20) / (1 << 20)


def new_name() -> PlannerId:
    return PlannerId(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


def run(config: Config, *, is_single: bool, as_json: bool) -> int:
    """Run `tandem planner`: make decisions until SIGINT or SIGTERM, or with `is_single` one decision.

    With `as_json` each decision is printed as a line of JSON. Returns the exit code: 0, or 1 if a single decision
    failed. Raises TandemError for settings that cannot be used."""
    me = new_name()
    set_up_logging(config.telemetry, "tandem-planner", me)
    return asyncio.run(_once(config, me, as_json=as_json) if is_single else _serve(config, me, as_json=as_json))


async def _serve(config: Config, me: PlannerId, *, as_json: bool) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stopped.set)
    program = Program(config, me, _print if as_json else lambda plan: None)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(program.stop)
        program.listen()
        ready_line = {"ready": True, "planner": me, "metrics": program.endpoint.address}
        print(json.dumps(ready_line), flush=True)  # noqa: T201 - for whoever started us
        await program.run(stopped)
    return 0


async def _once(config: Config, me: PlannerId, *, as_json: bool) -> int:
    """Make a single decision from two looks an interval apart, because demand is the difference between two looks."""
    program = Program(config, me, lambda plan: None)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(program.stop)
        await program.claim()
        plan = await program.loop.once()
        if plan.observed is not None and plan.observed.demand is None:
            await asyncio.sleep(config.planner.interval_s)
            await program.claim()
            plan = await program.loop.once()
    if as_json:
        _print(plan)
    else:
        print("\n".join((plan.headline, *(f"  {each}" for each in plan.sentences))))  # noqa: T201
    return 1 if plan.outcome == "failed" else 0


def _print(plan: PlanReport) -> None:
    print(json.dumps(plan.as_json()), flush=True)  # noqa: T201 - the command's output
