"""Compare autoscalers with fixed numbers of workers on recorded traffic, in virtual time.

    TANDEM_TRACES=DIR python -m loadtest autoscale [--load conversation|code] [--processes 2] [--write RESULTS.md]

Each row is one run of a whole day, to its end, with every request in it. The *planner* is `tandem.scaling`, as the
program `tandem planner` runs it; *queue* is the default policy of Ray Serve, with several target numbers of requests
per worker, because the right one is unknown; *fixed* keeps a constant split.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from loadtest.cluster.autoscale_run import LOADS, AutoscaleOutcome, AutoscalerConfig, run
from loadtest.common.marks import put_between_marks
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
    configs = (
        [AutoscalerConfig.parse(text) for text in args.autoscalers.split(",")] if args.autoscalers else load.configs
    )
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        outcomes = []
        for outcome in pool.map(partial(run, load, folder / load.trace), configs):
            sys.stderr.write(f"{outcome.config}: {outcome.good_share:.2%} good, {outcome.gpu_hours:.1f} GPU hours, ")
            sys.stderr.write(f"{outcome.wall_s:.0f} s\n")
            outcomes.append(outcome)
    text = report_text(outcomes, load.slo)
    sys.stdout.write(text)
    if args.write is not None:
        put_between_marks(args.write, f"autoscale {args.load}", text)
    return 0


def report_text(outcomes: Sequence[AutoscaleOutcome], slo: Slo) -> str:
    """Return the outcomes as Markdown: a table with a row for each autoscaler, and the conclusions."""
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
    """Return sentences that compare the planner with fixed numbers of workers.

    They are the best fixed split that costs no more than the planner, and the smallest one that keeps the targets.
    """
    planner = next((outcome for outcome in outcomes if outcome.config.kind == "planner"), None)
    fixed = [outcome for outcome in outcomes if outcome.config.kind == "fixed"]
    lines: list[str] = []
    if planner is None:
        return ""
    affordable = [outcome for outcome in fixed if outcome.gpu_hours <= planner.gpu_hours]
    if affordable:
        best = max(affordable, key=lambda outcome: (outcome.good_share, -outcome.gpu_hours))
        lines.append(
            f"The best fixed split for no more GPU hours is {best.config}: {best.good_share:.2%} of the requests are "
            f"good ({slo}), and {planner.good_share:.2%} of the planner's."
        )
    for when, worst in (("over the day", False), ("in every tenth of it", True)):
        enough = [
            outcome
            for outcome in fixed
            if (outcome.worst_share if worst else outcome.good_share) >= planner.percentile / 100
        ]
        if not enough:
            continue
        peak = min(enough, key=lambda outcome: (outcome.gpu_hours, -outcome.good_share))
        saved = 1 - planner.gpu_hours / peak.gpu_hours
        mine = planner.worst_share if worst else planner.good_share
        lines.append(
            f"The smallest split by which {planner.percentile:g} % are good {when} is {peak.config} with "
            f"{peak.gpu_hours:.1f} GPU hours: the planner, with {mine:.2%}, takes {saved:.1%} fewer."
        )
    return "\n".join(lines) + "\n"


def _row(outcome: AutoscaleOutcome) -> tuple[str, ...]:
    return (
        str(outcome.config),
        f"{outcome.mean_prefill:.1f} + {outcome.mean_decode:.1f}",
        f"{outcome.most_prefill} + {outcome.most_decode}",
        f"{outcome.gpu_hours:.1f}",
        f"{outcome.good_share:.2%}",
        f"{outcome.worst_share:.2%}",
        f"{outcome.late_share:.2%}",
        f"{outcome.late_gap_share:.2%}",
        ms(outcome.ttft_p99_s),
        ms(outcome.itl_p99_s),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest autoscale", description="Autoscalers against fixed splits.")
    parser.add_argument("--load", choices=sorted(LOADS), default="conversation", help="default: %(default)s")
    parser.add_argument(
        "--autoscalers",
        default="",
        metavar="NAME,...",
        help="planner, queue=2:16, fixed=8+3 (default: those of the load)",
    )
    parser.add_argument("--copies", type=int, default=0, help="of the recorded hour (default: those of the load)")
    parser.add_argument("--processes", type=int, default=2, help="runs side by side (default: %(default)s)")
    parser.add_argument("--write", type=Path, default=None, metavar="FILE", help="put the table between its marks")
    return parser
