"""Implement `tandem simulate`: run a workload on a simulated cluster in virtual time and print a report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tandem.cli import simulate_setup
from tandem.cli.progress_bar import ProgressBar
from tandem.cli.simulate_flags import SECTIONS
from tandem.core.clock import SystemClock
from tandem.core.config import PlannerConfig
from tandem.core.errors import invalid_request
from tandem.core.lane import ALL_LANES
from tandem.core.settings import Resolved
from tandem.core.slo import Slo, parse_slo
from tandem.scaling.cluster_state import Role
from tandem.scaling.decision import Decision
from tandem.scaling.scaler import Scaler
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.machines.deployment import Deployment, parse_pools
from tandem.sim.report import table
from tandem.sim.report.report import ALL, GroupTally, LatencyStats, SimulationReport
from tandem.sim.report.time_series import Series
from tandem.sim.scaling.autoscale import ROLES, Autoscaler, ElasticRun, ElasticSpec, ScalerAdapter, simulate_elastic
from tandem.sim.scaling.queue_scaler import QueuePolicy, QueueScaler
from tandem.sim.simulate import rare_garbage_collection, simulate

FORMAT = "tandem-simulation-1"
AUTOSCALE_FORMAT = "tandem-autoscale-1"


def run(resolved: Resolved, args: argparse.Namespace) -> int:
    """Simulate the workload on the cluster that the flags describe and print a report; returns the exit code 0.

    It is 0 even if requests were not served. Raises TandemError(INVALID_REQUEST) for invalid flags."""
    machines, resolved = simulate_setup.machines(resolved, args)
    if len(machines) > 1:
        raise invalid_request(
            f"--hardware {args.hardware} names several kinds, but a simulated cluster has one: name one"
        )
    deployment = Deployment(
        machine=machines[0],
        pools=parse_pools(args.pools, args.tp),
        config=resolved.config,
        link_bandwidth=simulate_setup.link_bandwidth(args),
        kv_bytes=simulate_setup.kv_bytes(resolved),
        tenants=simulate_setup.tenants(resolved),
    )
    slo, path = parse_slo(args.slo), simulate_setup.writable("--json", args.json)
    chart = simulate_setup.chart_path(args)
    if args.autoscale:
        if chart is not None:
            raise invalid_request("--chart cannot draw a run with --autoscale: write its numbers with --json")
        return _run_autoscaled(deployment, resolved.config.planner, args, slo, path)
    series = Series() if path or chart else None
    count = simulate_setup.count_of(args)
    report, tally, wall_s = _run(deployment, args, slo, series, count)
    heading = f"{args.workload}, seed {args.seed}: {deployment}"
    rate = f"{report.num_requests / wall_s:,.0f} requests per second" if wall_s else "at once"
    facts = [*deployment.machine.about, ("simulated", f"in {wall_s:.1f} s, {rate}")]
    print(f"{heading}\n\n{table.format_report(report, slo)}\n{table.facts(facts)}")  # noqa: T201 - the command's output
    if path is not None:
        simulate_setup.write_json(path, _document(args, count, deployment, report, tally, series))
    if chart is not None and series is not None:
        import_module("tandem.sim.report.chart").render_run(chart, heading, tally, series)
    return 0


def _run(
    deployment: Deployment, args: argparse.Namespace, slo: Slo, series: Series | None, count: int | None
) -> tuple[SimulationReport, LatencyStats, float]:
    clock = SystemClock()
    began = clock.now()
    num_ended = 0

    def look(cluster: SimCluster, _tally: LatencyStats) -> None:
        nonlocal num_ended
        num_ended += 1
        bar.update(num_ended, lambda: f"{cluster.now:,.1f} s virtual, {num_ended / (clock.now() - began):,.0f}/s")

    with ProgressBar(clock, count) as bar, rare_garbage_collection():
        try:
            requests = simulate_setup.workload_requests(args, count, args.seed)
            report, tally = simulate(deployment.cluster(args.seed), requests, slo, series=series, look=look)
        except ValueError as error:
            raise invalid_request(str(error)) from error
    return report, tally, clock.now() - began


def _document(
    args: argparse.Namespace,
    count: int | None,
    deployment: Deployment,
    report: SimulationReport,
    tally: LatencyStats,
    series: Series | None,
) -> dict[str, Any]:
    """Return the content of the `--json` file, in seconds, bytes and tokens as the dataclasses define them.

    `buckets` holds the distribution of each measure for each class of requests, as `Histogram.buckets`. `loadtest
    compare` reads parts of the file.
    """
    assert series is not None, "a document has a series"
    return {
        "format": FORMAT,
        "workload": simulate_setup.workload_document(args) | {"count": count},
        "deployment": {
            "name": str(deployment),
            "machine": deployment.machine.name,
            "pools": [asdict(pool) for pool in deployment.pools],
            "num_gpus": deployment.num_gpus,
            "price_per_hour": deployment.price_per_hour,
            "about": dict(deployment.machine.about),
        },
        "settings": {section: asdict(getattr(deployment.config, section)) for section in SECTIONS},
        "slo": asdict(tally.slo),
        "report": asdict(report),
        "buckets": {name: _buckets(group) for name, group in {ALL: tally.all(), **tally.groups}.items()},
        "series": {
            "windows": [asdict(window) for window in series.windows()],
            "pools": {pool: [asdict(sample) for sample in samples] for pool, samples in series.pools().items()},
            "queued": series.queued,
        },
    }


def _buckets(group: GroupTally) -> dict[str, list[tuple[float, int]]]:
    measures = {"ttft": group.ttft, "itl": group.itl, "tpot": group.tpot, "e2e": group.e2e}
    return {name: [(round(s, 7), number) for s, number in times.buckets()] for name, times in measures.items()}


def _run_autoscaled(
    deployment: Deployment, planner: PlannerConfig, args: argparse.Namespace, slo: Slo, path: Path | None
) -> int:
    """Simulate a cluster whose number of workers an autoscaler changes, and print the report; returns 0."""
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
            raise invalid_request(str(error)) from error
    heading = f"{args.workload}, seed {args.seed}: {args.autoscale}, beginning with {deployment}"
    facts = table.facts(deployment.machine.about)
    print(f"{heading}\n\n{done.describe(slo)}\n{facts}")  # noqa: T201 - the command's output
    if path is not None:
        decisions = scaler.decisions if isinstance(scaler, ScalerAdapter) else ()
        simulate_setup.write_json(path, _autoscale_document(args, done, decisions))
    return 0


def _scaler(text: str, planner: PlannerConfig, slo: Slo) -> Autoscaler:
    kind, _, rest = text.partition("=")
    if kind == "planner" and not rest:
        return ScalerAdapter(Scaler(replace(planner, change_roles=False), slo))  # a simulated worker keeps its role
    numbers = rest.split(":")
    if kind != "queue" or len(numbers) != 2 or not all(n.isascii() and n.isdecimal() and int(n) for n in numbers):
        raise invalid_request(
            f"--autoscale {text}: use planner, or queue=2:16 (requests at each prefill and decode worker)"
        )
    return QueueScaler(QueuePolicy(ongoing_per_worker=(float(numbers[0]), float(numbers[1]))))


def _kinds(workers: Sequence[tuple[WorkerSpec, int]]) -> dict[Role, WorkerSpec]:
    if any(kind.lanes != ALL_LANES for kind, _ in workers):
        raise invalid_request("--autoscale sizes pools for all lanes: leave the lanes out of --pools")
    kinds = {role: kind for kind, _ in workers for role in ROLES if kind.pool == role}
    if len(kinds) < len(ROLES):
        raise invalid_request(
            "--autoscale needs a prefill and a decode worker to begin with: --pools prefill=1,decode=1"
        )
    return kinds


def _autoscale_document(args: argparse.Namespace, done: ElasticRun, decisions: Sequence[Decision]) -> dict[str, Any]:
    """Return the content of the `--json` file: GPU hours, the cluster's size at every sample, and every decision with
    its reasons."""
    return {
        "format": AUTOSCALE_FORMAT,
        "autoscale": args.autoscale,
        "gpu_hours": done.gpu_hours,
        "report": asdict(done.report),
        "moments": [asdict(moment) for moment in done.moments],
        "decisions": [asdict(decision) for decision in decisions],
    }
