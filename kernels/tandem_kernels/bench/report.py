"""Format the outcome of a bench as JSON and as the Markdown of RESULTS.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tandem_kernels.bench.case import BenchRow
from tandem_kernels.bench.roofline import DeviceLimits
from tandem_kernels.bench.runner import RunOutcome

_CLOSE = 1.02
"""Factor on the fastest time up to which block sizes count as equal; the smallest wins, as it wastes least memory."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Results of a bench run, to be formatted. `machine`: command, date, versions, device and clocks by name. `limits`:
    measured limits of the device."""

    machine: Mapping[str, str]
    limits: DeviceLimits
    outcome: RunOutcome

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; an infinite error is null."""
        rows = [asdict(row) | {"bytes_s": row.bytes_s, "flops_s": row.flops_s} for row in self.outcome.rows]
        checks = [
            asdict(check) | {"is_right": check.is_right, "error": check.error if math.isfinite(check.error) else None}
            for check in self.outcome.checks
        ]
        return {
            "machine": dict(self.machine),
            "limits": asdict(self.limits),
            "checks": checks,
            "rows": rows,
            "block_size": best_block_size(self.outcome.rows),
            "left_out": self.outcome.left_out,
            "failed": self.outcome.failed,
        }

    def to_markdown(self) -> str:
        parts = [_facts(self.machine), _limits(self.limits), _verdicts(self.outcome)]
        for group in dict.fromkeys(row.group for row in self.outcome.rows):
            parts.append(f"### {group}\n\n{_rows([row for row in self.outcome.rows if row.group == group])}")
        best = best_block_size(self.outcome.rows)
        if best:
            parts.append(f"Block size that these figures suggest: {best}.\n")
        loss = layout_loss(self.outcome.rows)
        if loss:
            lines = [f"- {name}: {share:+.1%}" for name, share in loss.items()]
            parts.append("\n".join(["Time of contiguous blocks against outermost layers:", "", *lines, ""]))
        for title, names in (("Left out", self.outcome.left_out), ("Failed", self.outcome.failed)):
            if names:
                parts.append("\n".join([f"### {title}", "", *(f"- {name}: {why}" for name, why in names.items()), ""]))
        return "\n".join(parts)


def best_block_size(rows: list[BenchRow]) -> int:
    """Return the smallest block size whose time is within 2 % of the best; 0 if no case was measured.

    The time is the geometric mean over the cases of group "block size". Only block sizes with the greatest number of
    measured cases are compared.
    """
    times: dict[int, dict[str, float]] = {}
    for row in rows:
        before, marker, rest = row.name.partition(" blocks of ")
        if row.group == "block size" and marker:
            size, _, what = rest.partition(" ")
            times.setdefault(int(size), {})[f"{before} {what}"] = row.timing.median_s
    most = max(map(len, times.values()), default=0)
    means = {
        size: math.exp(math.fsum(map(math.log, ours.values())) / most)
        for size, ours in times.items()
        if len(ours) == most
    }
    return min((size for size in means if means[size] <= _CLOSE * min(means.values())), default=0)


def layout_loss(rows: list[BenchRow]) -> dict[str, float]:
    """Return for each case the fraction by which attention takes longer over contiguous blocks than with layers
    outermost.

    Cases without both measurements are omitted.
    """
    pairs: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.group == "layout":
            case, _, layout = row.name.rpartition(", ")
            pairs.setdefault(case, {})[layout] = row.timing.median_s
    ours, theirs = "blocks contiguous", "layers outermost"
    return {case: pair[ours] / pair[theirs] - 1 for case, pair in pairs.items() if len(pair) == len((ours, theirs))}


def _facts(machine: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in machine.items()) + "\n"


def _limits(limits: DeviceLimits) -> str:
    lines = [
        "| limit | measured |",
        "|---|---:|",
        f"| copy, read and written | {limits.copy_bytes_s / 1e9:,.0f} GB/s |",
        f"| read only (a sum) | {limits.read_bytes_s / 1e9:,.0f} GB/s |",
        *(f"| matrix {name} | {rate / 1e12:,.1f} TFLOP/s |" for name, rate in limits.matrices.items()),
        f"| launch, eager | {limits.launch_eager_s * 1e6:.1f} us |",
        f"| launch, in a graph | {limits.launch_graph_s * 1e6:.1f} us |",
        f"| an empty kernel by this clock | {limits.empty_s * 1e6:.1f} us |",
    ]
    return "\n".join(["### Limits", "", *lines, ""])


def _verdicts(outcome: RunOutcome) -> str:
    wrong = [check for check in outcome.checks if not check.is_right]
    lines = [f"{len(outcome.checks) - len(wrong)} of {len(outcome.checks)} checks against the reference hold."]
    lines += [
        f"- WRONG: {check.name}: {check.failure or f'{check.error:.1e} > {check.tolerance:.0e}'}" for check in wrong
    ]
    return "\n".join(["### Correctness", "", *lines, ""])


def _rows(rows: list[BenchRow]) -> str:
    lines = ["| case | time | p10 to p90 | GB/s | TFLOP/s | of the limit | torch, and how much longer |"]
    lines.append("|---|---:|---:|---:|---:|---:|---|")
    for row in rows:
        timing = row.timing
        rivals = ", ".join(
            f"{name} {_us(rival.median_s)} ({rival.median_s / timing.median_s:.2f}x)"
            for name, rival in row.rivals.items()
        )
        cells = (
            row.name + ("" if timing.mode != "eager" else " (eager)"),
            _us(timing.median_s),
            f"{_us(timing.low_s)} to {_us(timing.high_s)}",
            f"{row.bytes_s / 1e9:,.0f}",
            f"{row.flops_s / 1e12:,.1f}" if row.flops else "",
            f"{row.share:.0%}",
            rivals,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"
