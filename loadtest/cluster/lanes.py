"""Compare ways to serve a chat and batch requests on one cluster, in virtual time, with the real engine and router.

    TANDEM_TRACES=DIR python -m loadtest lanes [--load summaries,answers] [--write RESULTS.md]

The chat is Mooncake's conversation trace at its own pace, which takes a third of what the prefill workers can compute;
another tenant offers batch requests, at multiples of what the same cluster serves of them without a chat. All rows of a
table have the same chat requests, and rows with equal offers the same batch requests.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from loadtest.cluster.lanes_run import (
    LOADS,
    MOST,
    BatchLoad,
    ChatTrace,
    LaneOutcome,
    LaneRun,
    LaneSetup,
    capacity,
    requests,
)
from loadtest.cluster.routing import TRACE
from loadtest.common.marks import put_between_marks
from loadtest.common.stats import percentile
from loadtest.common.tables import ms, table
from tandem.core.clock import SystemClock
from tandem.sim.simulate import rare_garbage_collection

GOAL = 1.15
HOST_MEMORY = 64 << 30
NO_LANES = LaneSetup(name="one lane", has_lanes=False)
LANES = LaneSetup(name="lanes")
PREEMPTING = (
    LaneSetup(name="lanes, `lanes.max_preemptions=0`", max_preemptions=0),
    LaneSetup(name="lanes, yielding requests are aborted and sent again", is_aborting=True),
    LaneSetup(name="lanes, yielding requests are computed again", reuses_kv=False),
    LaneSetup(name="lanes, 64 GiB of host memory", host_memory=HOST_MEMORY),
)
"""Setups that differ from `LANES` only in what happens to a request that yields."""
BOUND = {
    "summaries": LaneSetup(
        name="`decode=3:interactive+standard,decode=1:batch`",
        pools="prefill=4,decode=3:interactive+standard,decode=1:batch",
    ),
    "answers": LaneSetup(
        name="`decode=2:interactive+standard,decode=2:batch`",
        pools="prefill=4,decode=2:interactive+standard,decode=2:batch",
    ),
}
"""Workers that are bound to lanes, for each load."""
LIMITED = {
    "summaries": LaneSetup(name="lanes, `lanes.batch_max_share=0.08`", batch_max_share=0.08),
    "answers": LaneSetup(name="lanes, `lanes.batch_max_share=0.2`", batch_max_share=0.2),
}
"""The limit of batch requests for each load: 5 or 12 sequences of a worker's 64."""


class Row(NamedTuple):
    """Hold one row: a setup, the batch requests that are offered as a multiple of the capacity, and the results."""

    setup: LaneSetup
    offered: float
    outcome: LaneOutcome


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    trace = Path(os.environ.get("TANDEM_TRACES", "")) / TRACE
    if not trace.is_file():
        sys.stderr.write(f"loadtest lanes: set TANDEM_TRACES to a folder with {TRACE}\n")
        return 1
    for name in args.load.split(","):
        with rare_garbage_collection():
            load = LOADS[name] if args.offers is None else replace(LOADS[name], offers=args.offers)
            text = report_text(name, list(_rows(name, load, ChatTrace(trace, args.first))))
        sys.stdout.write(text)
        if args.write is not None:
            put_between_marks(args.write, f"lanes {name}", text)
    return 0


def report_text(name: str, rows: Sequence[Row]) -> str:
    """Return the rows as Markdown. The first two, the chat alone and the flood without a chat, are what the others are
    compared with."""
    alone, flooded, *others = rows
    load = LOADS[name]
    served = capacity(load, flooded.outcome)
    shared = {row.offered: row.outcome.batch_rate for row in others if row.setup is NO_LANES}
    heads = (
        f"`{name}`", "offered", "chat: TTFT p50 / p99, ms", "ITL p50 / p99, ms", "p99 / alone: TTFT, ITL",
        "batch tokens/s", "of one lane", "yields", "computed again, tokens", "longest pause, s",
    )  # fmt: skip
    lines = [_cells(alone, alone.outcome, {})]
    lines += [_cells(row, alone.outcome, shared) for row in others]
    prefix = (
        f"{len(alone.outcome.ttft_s)} chat requests and the tokens count from {load.begin_s:g} to {load.end_s:g} s. "
        f"Capacity: {served:.1f} batch requests/s, {flooded.outcome.batch_rate:,.0f} tokens/s. "
        f"Failed requests: {sum(row.outcome.num_failed for row in rows)}.\n"
    )
    return table(heads, lines) + "\n" + prefix + _unused_text(others)


def _unused_text(rows: Sequence[Row]) -> str:
    is_compared = any(row.setup in PREEMPTING for row in rows)
    return "" if is_compared else "No request yields here, so that it does not matter what would happen to it.\n"


def _cells(row: Row, alone: LaneOutcome, shared: dict[float, float]) -> tuple[str, ...]:
    found = row.outcome
    times = [[percentile(values, share) for share in (0.5, 0.99)] for values in (found.ttft_s, found.gaps_s)]
    usual = [percentile(values, 0.99) for values in (alone.ttft_s, alone.gaps_s)]
    chat = [" / ".join(map(ms, pair)) for pair in times]
    if found is alone:
        return ("the chat alone", "0", *chat, "", "", "", "", "", "")
    ratios = [_ratio(pair[1] / base) for pair, base in zip(times, usual, strict=True)]
    loaded = f", {found.num_loaded:,} from host memory" if found.num_loaded else ""
    return (
        row.setup.name,
        f"{row.offered:g}",
        *chat,
        ", ".join(ratios),
        f"{found.batch_rate:,.0f}",
        f"{found.batch_rate / shared[row.offered]:.0%}",
        f"{found.num_yields:,}" + (f", {found.num_aborted:,} aborted" if row.setup.is_aborting else ""),
        f"{found.num_again:,}{loaded}",
        f"{found.pause_s:.1f}",
    )


def _ratio(value: float) -> str:
    return f"**{value:.2f}**" if value <= GOAL else f"{value:.2f}"


def _rows(name: str, load: BatchLoad, chat: ChatTrace) -> Iterator[Row]:
    yield _run(LaneSetup(name="alone"), 0.0, load, 0.0, chat)
    flooded = _run(NO_LANES, 0.0, load, load.flood_rate, None)
    yield flooded
    served = capacity(load, flooded.outcome)
    for offered in load.offers:
        yield _run(NO_LANES, offered, load, offered * served, chat)
    lanes = _run(LANES, MOST, load, MOST * served, chat)
    for setup in PREEMPTING if lanes.outcome.num_yields else ():
        yield _run(setup, MOST, load, MOST * served, chat)
    yield lanes
    yield _run(BOUND[name], MOST, load, MOST * served, chat)
    for offered in load.offers:
        yield _run(LIMITED[name], offered, load, offered * served, chat)


def _run(setup: LaneSetup, offered: float, load: BatchLoad, rate: float, chat: ChatTrace | None) -> Row:
    clock = SystemClock()
    began = clock.now()
    outcome = LaneRun(setup, load).run(requests(load, setup, rate, chat))
    times = [percentile(values, 0.99) if values else 0.0 for values in (outcome.ttft_s, outcome.gaps_s)]
    sys.stderr.write(
        f"{setup.name} at {offered:g}: p99 {' / '.join(map(ms, times))} ms, {outcome.batch_rate:,.0f} tokens/s, "
        f"{outcome.num_yields} yields, {outcome.num_queued} wait, {clock.now() - began:.0f} s\n"
    )
    return Row(setup, offered, outcome)


def _offers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest lanes", description="A chat and batch requests on one cluster.")
    parser.add_argument("--load", default=",".join(LOADS), help="kinds of batch requests (default: all)")
    parser.add_argument("--offers", type=_offers, default=None, help="multiples of the capacity (default: the load's)")
    parser.add_argument("--first", type=int, default=0, help="number of the trace's request to begin with (default: 0)")
    parser.add_argument("--write", type=Path, default=None, metavar="FILE", help="put the tables between their marks")
    return parser
