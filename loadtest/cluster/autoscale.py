"""Autoscalers against fixed numbers of workers on recorded traffic, in virtual time; never starts a worker.

    TANDEM_TRACES=DIR python -m loadtest autoscale [--load conversation|code] [--processes 2] [--write RESULTS.md]

Each line is one run of a whole day, to its end, with every request in it. The *planner* is `tandem.scaling`, as the
program `tandem planner` runs it; *queue* is the policy that Ray Serve has by itself, with several numbers of requests
per worker, because nobody tells which is right; a fixed split is what one gets without either.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from loadtest.cluster.autoscale_run import LOADS, AutoscaleOutcome, AutoscalerConfig, run
from loadtest.common.tables import ms, table
from tandem.core.slo import Slo


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    folder = Path(os.environ.get("TANDEM_TRACES", ""))
    load = LOADS[args.load]
    load = replace(load, day=replace(load.day, num_copies=args.copies or load.day.num_copies))
    if not os.environ.get("TANDEM_TRACES") or not (folder / load.trace).is_file():
        sys.stderr.write(f"loadtest autoscale: set TANDEM_TRACES to a folder with {load.trace}\n")
        return 1
    ways = [AutoscalerConfig.parse(text) for text in args.ways.split(",")] if args.ways else load.ways
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        outcomes = []
        for outcome in pool.map(partial(run, load, folder / load.trace), ways):
            sys.stderr.write(f"{outcome.way}: {outcome.good_share:.2%} good, {outcome.gpu_hours:.1f} GPU hours, ")
            sys.stderr.write(f"{outcome.wall_s:.0f} s\n")
            outcomes.append(outcome)
    text = told(outcomes, load.slo)
    sys.stdout.write(text)
    if args.write is not None:
        _write(args.write, args.load, text)
    return 0


def told(outcomes: Sequence[AutoscaleOutcome], slo: Slo) -> str:
    """Markdown: a line for each way, and what follows from them."""
    heads = (
        "",
        "workers, mean",
        "most",
        "GPU hours",
        "good",
        "worst tenth",
        "TTFT late",
        "gaps late",
        "TTFT p99, ms",
        "ITL p99, ms",
    )
    return table(heads, list(map(_row, outcomes))) + "\n" + verdict(outcomes, slo)


def verdict(outcomes: Sequence[AutoscaleOutcome], slo: Slo) -> str:
    """The planner beside the best fixed split that costs no more, and beside the smallest that keeps the targets."""
    planner = next((one for one in outcomes if one.way.kind == "planner"), None)
    fixed = [one for one in outcomes if one.way.kind == "fixed"]
    lines: list[str] = []
    if planner is None:
        return ""
    affordable = [one for one in fixed if one.gpu_hours <= planner.gpu_hours]
    if affordable:
        best = max(affordable, key=lambda one: (one.good_share, -one.gpu_hours))
        lines.append(
            f"The best fixed split for no more GPU hours is {best.way}: {best.good_share:.2%} of the requests are good "
            f"({slo}), and {planner.good_share:.2%} of the planner's."
        )
    for when, worst in (("over the day", False), ("in every tenth of it", True)):
        enough = [one for one in fixed if (one.worst_share if worst else one.good_share) >= planner.percentile / 100]
        if not enough:
            continue
        peak = min(enough, key=lambda one: (one.gpu_hours, -one.good_share))
        saved = 1 - planner.gpu_hours / peak.gpu_hours
        mine = planner.worst_share if worst else planner.good_share
        lines.append(
            f"The smallest split by which {planner.percentile:g} % are good {when} is {peak.way} with "
            f"{peak.gpu_hours:.1f} GPU hours: the planner, with {mine:.2%}, takes {saved:.1%} fewer."
        )
    return "\n".join(lines) + "\n"


def _row(one: AutoscaleOutcome) -> tuple[str, ...]:
    return (
        str(one.way),
        f"{one.mean_prefill:.1f} + {one.mean_decode:.1f}",
        f"{one.most_prefill} + {one.most_decode}",
        f"{one.gpu_hours:.1f}",
        f"{one.good_share:.2%}",
        f"{one.worst_share:.2%}",
        f"{one.late_share:.2%}",
        f"{one.late_gap_share:.2%}",
        ms(one.ttft_p99_s),
        ms(one.itl_p99_s),
    )


def _write(path: Path, name: str, text: str) -> None:
    """Between the marks of this load, which a person has put there with what is to be said around them."""
    begin, end = f"<!-- autoscale {name} -->", f"<!-- end of autoscale {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    before = path.read_text()
    if not pattern.search(before):
        raise SystemExit(f"loadtest autoscale: {path} has no {begin} with its {end}")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}{end}", before))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest autoscale", description="Autoscalers against fixed splits.")
    parser.add_argument("--load", choices=sorted(LOADS), default="conversation", help="default: %(default)s")
    parser.add_argument(
        "--ways", default="", metavar="WAY,...", help="planner, queue=2:16, fixed=8+3 (default: those of the load)"
    )
    parser.add_argument("--copies", type=int, default=0, help="of the recorded hour (default: those of the load)")
    parser.add_argument("--processes", type=int, default=2, help="runs side by side (default: %(default)s)")
    parser.add_argument("--write", type=Path, default=None, metavar="FILE", help="put the table between its marks")
    return parser
