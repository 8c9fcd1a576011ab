"""Implement `tandem simulate --autoscale`: simulate a cluster whose number of workers an autoscaler changes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tandem.cli import simulate_setup
from tandem.core.config import PlannerConfig
from tandem.core.slo import Slo
from tandem.planner.policy import policy_of
from tandem.scaling.cluster_state import Role
from tandem.scaling.decision import Decision
from tandem.scaling.scaler import Scaler
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.machines.deployment import Deployment
from tandem.sim.report import table
from tandem.sim.scaling.autoscale import ElasticRun, ScalerAdapter, format_run, simulate_elastic
from tandem.sim.scaling.autoscaled_cluster import ROLES, Autoscaler, ElasticSpec
from tandem.sim.scaling.queue_scaler import QueuePolicy, QueueScaler
from tandem.sim.simulate import rare_garbage_collection

FORMAT = "tandem-autoscale-1"


def run(deployment: Deployment, planner: PlannerConfig, args: argparse.Namespace, slo: Slo, path: Path | None) -> int:
    """Simulate and print the report; returns 0, even if requests were not served. Raises TandemError for invalid
    flags."""
    scaler = _scaler(args.autoscale, planner, slo)
    spec = deployment.cluster(args.seed)
    elastic = ElasticSpec(
        kinds=_kinds(spec.workers),
        degrees={role: pool.degree for pool in deployment.pools for role in ROLES if pool.pool == role},
        interval_s=planner.interval_s,
        start_s=planner.start_s,
    )
    requests = simulate_setup.workload_requests(args, simulate_setup.count_of(args), args.seed)
    with rare_garbage_collection():
        try:
            done = simulate_elastic(spec, elastic, scaler, requests, slo)
        except ValueError as error:
            raise simulate_setup.refuse(str(error)) from error
    heading = f"{args.workload}, seed {args.seed}: {args.autoscale}, beginning with {deployment}"
    facts = table.facts(deployment.machine.about)
    print(f"{heading}\n\n{format_run(done, slo)}\n{facts}")  # noqa: T201 - the command's output
    if path is not None:
        decisions = scaler.decisions if isinstance(scaler, ScalerAdapter) else ()
        simulate_setup.write_json(path, _document(args, done, decisions))
    return 0


def _scaler(text: str, planner: PlannerConfig, slo: Slo) -> Autoscaler:
    kind, _, rest = text.partition("=")
    if kind == "planner" and not rest:
        return ScalerAdapter(
            Scaler(replace(policy_of(planner, slo), change_roles=False))
        )  # a simulated worker keeps its role
    numbers = rest.split(":")
    if kind != "queue" or len(numbers) != 2 or not all(n.isascii() and n.isdecimal() and int(n) for n in numbers):
        raise simulate_setup.refuse(
            f"--autoscale {text}: use planner, or queue=2:16 (requests at each prefill and decode worker)"
        )
    return QueueScaler(QueuePolicy(ongoing_per_worker=(float(numbers[0]), float(numbers[1]))))


def _kinds(workers: Sequence[tuple[WorkerSpec, int]]) -> dict[Role, WorkerSpec]:
    kinds = {role: kind for kind, _ in workers for role in ROLES if kind.pool == role}
    if len(kinds) < len(ROLES):
        raise simulate_setup.refuse(
            "--autoscale needs a prefill and a decode worker to begin with: --pools prefill=1,decode=1"
        )
    return kinds


def _document(args: argparse.Namespace, done: ElasticRun, decisions: Sequence[Decision]) -> dict[str, Any]:
    """Return the content of the `--json` file: GPU hours, the cluster's size at every sample, and every decision with
    its reasons."""
    return {
        "format": FORMAT,
        "autoscale": args.autoscale,
        "gpu_hours": done.gpu_hours,
        "report": asdict(done.report),
        "moments": [asdict(moment) for moment in done.moments],
        "decisions": [asdict(decision) for decision in decisions],
    }
