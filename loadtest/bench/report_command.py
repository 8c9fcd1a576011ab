"""Print the stored results of one or several benches again, pooled: `python -m loadtest report FILE ...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.bench.report import BenchRun, add_report_flags, report_to


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest report", description="Print what a bench wrote as JSON.")
    parser.add_argument("files", nargs="+", type=Path, help="several are pooled; the first names the systems' order")
    add_report_flags(parser)
    args = parser.parse_args(argv)
    benches = [msgspec.json.decode(path.read_bytes(), type=BenchRun) for path in args.files]
    return report_to(pooled(benches), args)


def pooled(benches: Sequence[BenchRun]) -> BenchRun:
    """Return one bench with the runs of all given benches; its facts are those of the first."""
    systems = tuple(dict.fromkeys(system for bench in benches for system in bench.systems))
    runs = tuple(run for bench in benches for run in bench.runs)
    return BenchRun(systems=systems, runs=runs, facts=benches[0].facts)
