"""The outcome of a bench as JSON and as the Markdown of RESULTS.md; measures nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tandem_kernels.bench.case import BenchRow
from tandem_kernels.bench.roofline import DeviceLimits
from tandem_kernels.bench.runner import RunOutcome

_CLOSE = 1.02
"""Block sizes this close to the fastest count as equal, and the smallest of them wins: it wastes the least memory."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """`machine` tells command, date, versions, device and clocks by name."""

    machine: Mapping[str, str]
    limits: DeviceLimits
    outcome: RunOutcome

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold: an infinite error is null."""
        rows = [asdict(row) | {"bytes_s": row.bytes_s, "flops_s": row.flops_s} for row in self.outcome.rows]
        verdicts = [
            asdict(verdict)
            | {"is_right": verdict.is_right, "error": verdict.error if math.isfinite(verdict.error) else None}
            for verdict in self.outcome.verdicts
        ]
        return {
            "machine": dict(self.machine),
            "limits": asdict(self.limits),
            "checks": verdicts,
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
    """The smallest whose geometric mean over the cases of block sizes is within 2 % of the best; 0 where none was
    measured in all of them."""
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
    """By case, how much longer contiguous blocks took than outermost layers, as a share; where both were measured."""
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
    wrong = [verdict for verdict in outcome.verdicts if not verdict.is_right]
    lines = [f"{len(outcome.verdicts) - len(wrong)} of {len(outcome.verdicts)} checks against the reference hold."]
    lines += [f"- WRONG: {one.name}: {one.failure or f'{one.error:.1e} > {one.tolerance:.0e}'}" for one in wrong]
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
            row.name + ("" if timing.way != "eager" else " (eager)"),
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
