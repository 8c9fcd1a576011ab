"""Convert the output of `tandem simulate --json` to the shape of a load test's report.

Quantities that both have mean the same. What a simulated run does not have stays empty: tenants, the phases after the
first token, windows, and single requests. Gaps of a simulated run are between tokens, those of a client between
arrivals; a simulated run also counts tokens of failed answers.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest.common.distribution import of_spread
from loadtest.load.load_report import LoadReport, Scope
from tandem.core.slo import Slo
from tandem.sim.report.report import GroupReport

_MEASURES = ("ttft", "itl", "tpot", "e2e")


class _Workload(msgspec.Struct):
    workload: str
    seed: int
    count: int | None
    rate: float | None
    speedup: float


class _Deployment(msgspec.Struct):
    name: str


class _Report(msgspec.Struct):
    """Totals of a simulated run. The first of `groups` is all requests."""

    wall_s: float
    groups: tuple[GroupReport, ...]


class _Document(msgspec.Struct):
    workload: _Workload
    deployment: _Deployment
    slo: Slo
    report: _Report
    buckets: dict[str, dict[str, tuple[tuple[float, int], ...]]]


def decoded(raw: bytes) -> LoadReport:
    """Decode a simulated run. Raises msgspec.MsgspecError that names the field."""
    document = msgspec.json.decode(raw, type=_Document)
    wall_s = document.report.wall_s
    kinds = ["all"] + ["class"] * (len(document.report.groups) - 1)
    return LoadReport(
        name=f"simulated {document.deployment.name}",
        facts=_facts(document.workload),
        wall_s=wall_s,
        is_simulated=True,
        slo=document.slo,
        scopes=tuple(
            _scope(kind, group, document.buckets.get(group.name, {}), wall_s)
            for kind, group in zip(kinds, document.report.groups, strict=True)
        ),
    )


def _facts(workload: _Workload) -> dict[str, str]:
    """Return the workload's facts in the form of a load test's."""
    facts = {
        "workload": Path(workload.workload).name,
        "seed": workload.seed,
        "count": workload.count,
        "rate": workload.rate,
        "speedup": workload.speedup if workload.speedup != 1 else None,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _scope(kind: str, group: GroupReport, buckets: dict[str, tuple[tuple[float, int], ...]], wall_s: float) -> Scope:
    def rate(number: int) -> float:
        return number / wall_s if wall_s else 0.0

    spreads = {measure: getattr(group, measure) for measure in _MEASURES}
    return Scope(
        kind=kind,
        name=group.name,
        num_requests=group.num_requests,
        num_whole=group.num_complete,
        num_good=group.num_good,
        errors=group.errors,
        request_rate=rate(group.num_complete),
        good_rate=rate(group.num_good),
        prompt_rate=rate(group.num_prompt),
        output_rate=rate(group.num_output),
        times={name: of_spread(found, buckets.get(name, ())) for name, found in spreads.items() if found},
    )
