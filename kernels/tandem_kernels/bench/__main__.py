"""Check and time every kernel within a time budget.

    python -m tandem_kernels.bench [--only decode,chunk] [--quick] [--budget-s 480] [--json FILE] [--markdown FILE]

The bench measures the machine's limits, compares each kernel with the reference, and times it against those limits and
against what torch offers for the same work. The exit code is 1 when a kernel is wrong or a case failed. Without a GPU,
`--device cpu --tiny` runs everything at toy sizes as a smoke test; `--kernels triton` then uses Triton's interpreter.
`--kernels batch-invariant` selects the kernels of `model.batch_invariant` on any device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch

from tandem_kernels.bench.attention import attention_cases, layout_cases
from tandem_kernels.bench.case import Bench, BenchCase
from tandem_kernels.bench.checks import checks
from tandem_kernels.bench.environment import clocks, describe
from tandem_kernels.bench.grid import FULL, QUICK, TINY, Grid
from tandem_kernels.bench.report import KernelReport
from tandem_kernels.bench.roofline import measure_limits
from tandem_kernels.bench.rows import block_cases, coded_cases, mixture_cases, product_cases, row_cases, sampling_cases
from tandem_kernels.bench.runner import RunOutcome, run_cases, run_checks
from tandem_kernels.bench.timing import CudaStopwatch, HostStopwatch
from tandem_kernels.dispatch import REFERENCE, Kernels, KernelsUnavailable, kernels_for, triton_kernels

_CHECKS = "checks"
_CHECKS_SHARE = 0.4
"""Largest fraction of the budget for checks. They come first, because timings of wrong kernels are useless, but must
leave time for timings."""


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cpu" and not args.tiny:
        parser.error("a CPU takes toy sizes only: --tiny")
    groups = _groups(_grid(args))
    unknown = [word for word in _words(args) if not any(word in group for group in groups)]
    if unknown:
        parser.error(f"--only: no group is named like {', '.join(unknown)}; there are {', '.join(groups)}")
    try:
        bench = _open(args, device)
    except KernelsUnavailable as reason:
        sys.stderr.write(f"{reason}\n")
        return 2
    machine = describe(device, " ".join(["python -m tandem_kernels.bench", *argv]))
    report = _run(args, bench, machine)
    markdown = report.to_markdown()
    if args.json:
        args.json.write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(markdown, encoding="utf-8")
    sys.stdout.write(markdown)
    return 0 if report.outcome.is_right else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem_kernels.bench", description="Check and time the kernels.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", choices=("auto", "reference", "triton", "batch-invariant"), default="auto")
    parser.add_argument("--only", default="", metavar="WORD,...", help="parts of names of groups; `checks` is one")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a few cases of each kind: two minutes")
    size.add_argument("--tiny", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--budget-s", type=float, default=480.0, help="no case begins later (default: %(default)s)")
    parser.add_argument("--case-s", type=float, default=0.0, help="about so long each kernel is timed; 0: by size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    return parser


def _open(args: argparse.Namespace, device: torch.device) -> Bench:
    """Choose kernels, stopwatch and sizes by the arguments. Raises KernelsUnavailable."""
    grid = _grid(args)
    kernels = _kernels(args.kernels, device)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return Bench(device, kernels, CudaStopwatch(device, args.case_s or 0.3), grid, memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Bench(device, kernels, HostStopwatch(args.case_s or (0.0 if args.tiny else 0.3)), grid, memory)


def _grid(args: argparse.Namespace) -> Grid:
    return TINY if args.tiny else QUICK if args.quick else FULL


def _words(args: argparse.Namespace) -> list[str]:
    return [word for word in args.only.split(",") if word]


def _groups(grid: Grid) -> list[str]:
    return [_CHECKS, *dict.fromkeys(case.group for case in _cases(grid))]


def _kernels(choice: str, device: torch.device) -> Kernels:
    if choice == "reference":
        return REFERENCE
    if choice == "auto":
        return kernels_for(device)
    if device.type == "cpu":
        # Triton reads the variable at its import, which happens below.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return triton_kernels(batch_invariant=choice == "batch-invariant")


def _run(args: argparse.Namespace, bench: Bench, machine: dict[str, str]) -> KernelReport:
    began = bench.stopwatch.now()
    ends_at = began + args.budget_s
    outcome = RunOutcome()
    machine = machine | {"kernels": bench.kernels.name}
    torch.backends.cuda.matmul.allow_tf32 = False
    limits = measure_limits(bench.device, torch.bfloat16, bench.stopwatch, bench.grid)
    _log(f"limits: copy {limits.copy_bytes_s / 1e9:,.0f} GB/s, matrix {limits.matrix_flops_s / 1e12:,.1f} TFLOP/s")
    words = _words(args)
    if not words or any(word in _CHECKS for word in words):
        checked_by = began + _CHECKS_SHARE * args.budget_s
        run_checks(bench, checks(bench.grid), checked_by, outcome, _log)
    chosen = (case for case in _cases(bench.grid) if not words or any(word in case.group for word in words))
    run_cases(bench, limits, chosen, ends_at, outcome, _log)
    if bench.is_cuda:
        machine = machine | {"clocks after (SM, memory, degrees C, power)": clocks()}
    return KernelReport(machine | {"took": f"{bench.stopwatch.now() - began:.0f} s"}, limits, outcome)


def _cases(grid: Grid) -> Iterator[BenchCase]:
    """Yield all cases, the most important ones first in case the time runs out."""
    attention = list(attention_cases(grid))
    first = ("decode", "chunk")
    yield from (case for case in attention if case.group in first)
    yield from layout_cases(grid)
    yield from chain(
        (case for case in attention if case.group not in first),
        sampling_cases(grid),
        block_cases(grid),
        row_cases(grid),
        product_cases(grid),
        mixture_cases(grid),
        coded_cases(grid),
    )


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
