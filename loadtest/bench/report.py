"""Render the runs of a bench as Markdown, JSON and a chart."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from loadtest.bench.chart import render
from loadtest.client.records import Run, encode
from loadtest.common.plot import chart_path, save
from loadtest.common.stats import Agreement, Overhead, StatsPoint, Summary, agreement, overhead, pair_ratio, summarise
from loadtest.common.tables import ms, table
from tandem.core.quantile_sketch import LatencySummary
from tandem.core.slo import Slo

FULL_BATCH = 32
"""Number of decodes in a step from which its overhead is reported."""


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a bench, in the order in which they were made; the first of `systems` is compared with all others."""

    systems: tuple[str, ...]
    runs: tuple[Run, ...]
    facts: dict[str, str] = {}

    def workloads(self) -> list[str]:
        return list(dict.fromkeys(run.workload for run in self.runs))

    def of(self, system: str, workload: str) -> list[Run]:
        """Return the runs of this system and workload that did not fail."""
        return [run for run in self.runs if (run.system, run.workload) == (system, workload) and not run.failures]

    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.failures]


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run there")
    parser.add_argument("--chart", type=chart_path, metavar="FILE.svg|.png", help="draw ITL and TTFT there")
    add_slo_flags(parser)


def add_slo_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slo-ttft-ms", type=float, help="target of a request's first token")
    parser.add_argument("--slo-itl-ms", type=float, help="target of 95 %% of a request's gaps")


def report_to(bench: BenchRun, args: argparse.Namespace) -> int:
    """Write every output that the arguments select; return exit status 1 when a run failed, else 0."""
    slo = Slo.of_ms(args.slo_ttft_ms, args.slo_itl_ms)
    sys.stdout.write(markdown(bench, slo) + "\n")
    if args.json:
        args.json.write_bytes(encode(bench))
    if args.chart:
        save(render(bench.systems, bench.runs), args.chart)
    for run in bench.failed():
        sys.stderr.write(f"FAILED {run.system} {run.workload} seed {run.seed}: {'; '.join(run.failures[:3])}\n")
    return 1 if bench.failed() else 0


def markdown(bench: BenchRun, slo: Slo) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in bench.facts.items())
    parts = [f"{facts}\n", *(_section(bench, name, slo) for name in bench.workloads())]
    return "\n".join(parts)


def _section(bench: BenchRun, workload: str, slo: Slo) -> str:
    found = {system: summarise(bench.of(system, workload), slo) for system in bench.systems}
    summaries = {system: summary for system, summary in found.items() if summary is not None}
    parts = [f"## {workload}\n", _summary_table(summaries, slo)]
    groups = sorted({group for summary in summaries.values() for group in summary.ttft_by_group})
    if len(groups) > 1:
        parts.append(_group_table(summaries, groups))
    parts.append(_comparison(bench, workload, slo))
    steps = [step for system in bench.systems for run in bench.of(system, workload) for step in run.steps]
    cost = overhead(steps, FULL_BATCH) or overhead(steps, 1)
    if cost is not None:
        parts.append(_overhead_lines(cost))
    parts.append(_probe_line([run for run in bench.runs if run.workload == workload]))
    return "\n".join(part for part in parts if part)


# ---- tables


def _summary_table(summaries: dict[str, Summary], slo: Slo) -> str:
    heads = ["system", "requests", "TTFT p50 / p95 / p99 ms", "ITL p50 / p95 / p99 / max ms", "tok/s of one request"]
    heads += ["in tok/s", "out tok/s", "client late ms"]
    has_target = slo.ttft_s is not None or slo.itl_s is not None
    heads += ["good", "good req/s"] if has_target else []
    rows = []
    for system, summary in summaries.items():
        row = [system, str(summary.num_requests), _three(summary.ttft), _four(summary.itl)]
        row += [f"{1 / summary.tpot.p50:.1f}" if summary.tpot and summary.tpot.p50 else "-"]
        row += [f"{summary.prompt_rate:.0f}", f"{summary.output_rate:.1f}", f"{summary.late_s * 1e3:.1f}"]
        row += [f"{summary.good_share:.0%}", f"{summary.good_rate:.3f}"] if has_target else []
        rows.append(row)
    return table(heads, rows)


def _group_table(summaries: dict[str, Summary], groups: Sequence[str]) -> str:
    rows = []
    for system, summary in summaries.items():
        spreads = [summary.ttft_by_group.get(group) for group in groups]
        rows.append([system, *(f"{ms(s.p50)} / {ms(s.p99)}" if s else "-" for s in spreads)])
    return table(["TTFT p50 / p99 ms", *groups], rows)


def _three(spread: LatencySummary) -> str:
    return " / ".join(ms(value) for value in (spread.p50, spread.p95, spread.p99))


def _four(spread: LatencySummary | None) -> str:
    return "-" if spread is None else f"{_three(spread)} / {ms(spread.max)}"


# ---- ratios

_Metric = Callable[[Summary], float | None]
_METRICS: dict[str, _Metric] = {
    "TTFT p50": lambda s: s.ttft.p50,
    "ITL p50": lambda s: s.itl.p50 if s.itl else None,
    "ITL p99": lambda s: s.itl.p99 if s.itl else None,
    "longest gap": lambda s: s.itl.max if s.itl else None,
    "tok/s of one request": lambda s: 1 / s.tpot.p50 if s.tpot and s.tpot.p50 else None,
    "out tok/s": lambda s: s.output_rate,
}
"""Metrics that are compared. For times a ratio below 1 is better, for rates above 1."""


def _comparison(bench: BenchRun, workload: str, slo: Slo) -> str:
    ours, *others = [system for system in bench.systems if bench.of(system, workload)] or [""]
    rows, notes = [], []
    for other in others:
        cells = [_ratio_cell(bench, workload, ours, other, metric, slo) for metric in _METRICS.values()]
        rows.append([f"{ours} / {other}", *cells])
        notes.append(_agreement_line(other, _agreements(bench, workload, ours, other)))
    if not rows:
        return ""
    return table(["median ratio of pairs (range)", *_METRICS], rows) + "\n" + "\n".join(notes) + "\n"


def _ratio_cell(bench: BenchRun, workload: str, ours: str, other: str, metric: _Metric, slo: Slo) -> str:
    found = []
    for seed in dict.fromkeys(run.seed for run in bench.of(ours, workload)):
        sides = [_values(bench, system, workload, seed, metric, slo) for system in (ours, other)]
        found.append(pair_ratio(sides[0], sides[1]))
    ratios = [ratio for ratio in found if ratio is not None]
    if not ratios:
        return "-"
    middle = statistics.median(ratio.median for ratio in ratios)
    low, high = min(ratio.least for ratio in ratios), max(ratio.greatest for ratio in ratios)
    num_void = sum(ratio.num_void for ratio in ratios)
    void = f", {num_void} void" if num_void else ""
    return f"{middle:.2f} ({low:.2f}-{high:.2f}, n={sum(ratio.count for ratio in ratios)}{void})"


def _values(bench: BenchRun, system: str, workload: str, seed: int, metric: _Metric, slo: Slo) -> list[StatsPoint]:
    values = []
    for run in bench.of(system, workload):
        summary = summarise([run], slo) if run.seed == seed else None
        value = metric(summary) if summary is not None else None
        if value is not None:
            values.append(StatsPoint(run.began, value, run.speed))
    return values


def _agreements(bench: BenchRun, workload: str, ours: str, other: str) -> list[Agreement]:
    theirs = {(run.seed, run.turn): run for run in bench.of(other, workload)}
    mine = [run for run in bench.of(ours, workload) if (run.seed, run.turn) in theirs]
    return [agreement(run.records, theirs[run.seed, run.turn].records) for run in mine]


def _agreement_line(other: str, found: Sequence[Agreement]) -> str:
    num_compared, num_equal = sum(a.num_compared for a in found), sum(a.num_equal for a in found)
    if not num_compared:
        return f"- {other}: no answers to compare."
    unit = "tokens" if all(a.by_tokens for a in found) else "text"
    places = [f"{name} at {place}" for a in found for name, place in a.first_differences.items()]
    more = f", first {', '.join(places[:4])}{' ...' if len(places) > 4 else ''}" if places else ""
    return f"- {other}: {num_equal} of {num_compared} answers have equal {unit}{more}."


# ---- steps and machine


def _overhead_lines(cost: Overhead) -> str:
    parts = {
        "plan": cost.plan_s,
        "batch": cost.batch_s,
        "commit": cost.commit_s,
        "stream": cost.stream_s,
        "model": cost.model_s,
    }
    medians = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts.items())
    return (
        f"Steps with {cost.at_least} decodes or more and no prefill ({cost.num_steps}), medians in ms: {medians}. "
        f"Outside of the model: {cost.share:.1%}.\n"
    )


def _probe_line(runs: Sequence[Run]) -> str:
    probes = [probe for run in runs for probe in (run.before, run.after) if probe is not None]
    if not probes:
        return ""
    gemm, read = [probe.gflops for probe in probes], [probe.read_gbs for probe in probes]
    return f"Probe: {min(gemm):.0f}-{max(gemm):.0f} GFLOP/s, {min(read):.1f}-{max(read):.1f} GB/s.\n"
