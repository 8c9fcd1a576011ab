"""Format the result of a run with an autoscaler as text."""

from __future__ import annotations

from itertools import pairwise

from tandem.core.slo import Slo
from tandem.sim.report import table
from tandem.sim.scaling.autoscale import ElasticRun
from tandem.sim.scaling.autoscaled_cluster import ROLES


def format_run(run: ElasticRun, slo: Slo) -> str:
    """Return several paragraphs: latencies by class, workers, totals."""
    return "\n\n".join((table.latencies(run.report.groups), workers(run), totals(run, slo)))


def workers(run: ElasticRun) -> str:
    rows: list[tuple[str, ...]] = [("workers", "least", "mean", "most", "changes")]
    for index, role in enumerate(ROLES):
        sizes = [moment.serving[index] for moment in run.moments]
        targets = [moment.target[index] for moment in run.moments]
        changes = sum(one != other for one, other in pairwise(targets))
        mean = sum(sizes) / max(1, len(sizes))
        rows.append((f"  {role}", f"{min(sizes, default=0)}", f"{mean:.1f}", f"{max(sizes, default=0)}", f"{changes}"))
    return table.grid(rows)


def totals(run: ElasticRun, slo: Slo) -> str:
    report = run.report
    refused = ", ".join(f"{number:,} {kind}" for kind, number in report.errors.items()) or "none"
    return table.facts([
        ("requests", f"{report.num_requests:,} in {report.wall_s:,.1f} s virtual; not served: {refused}"),
        ("goodput", f"{report.good_rate:,.1f} requests/s = {report.good_share:.1%} inside {slo}"),
        ("GPU hours", f"{run.gpu_hours:,.2f}, of which starting and draining are a part"),
        ("digest", f"{report.digest} of {report.num_events:,} events"),
    ])  # fmt: skip
