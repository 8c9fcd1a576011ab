"""Measure what telemetry adds to an engine's step and to a gateway's streamed token.

    python -m loadtest telemetry [--quick] [--launches N] [--rounds N] [--only streams] [--core N] [--before DIRECTORY]
                                 [--json FILE]

Two *sides* are compared in short alternating *turns*: without and with telemetry. A round has several turns of each
side; after some rounds the processes are started anew. Both sides are one process that turns telemetry off and on; with
`--before` they are two processes on one core. The result is processor time, which the kernel counts for each process,
so that it is valid on a busy machine too. Because other programs still change the machine's speed, costs are adjusted
by a core-speed probe that runs beside the turns.

With telemetry, each step is reported to all observers, metrics are scraped, and a gateway sends traces to a receiver of
OTLP. Without, there are no observers, and counters count nothing. Streams are measured twice: as installed by the
chart, with one request in a hundred traced and failed ones logged; and with all of it, where every request is traced
and logged as JSON to a file, metrics are pushed, and a console polls once in a round. `--before` is a checkout of an
older commit, which is then the side without: the result is the whole cost of telemetry, including the ledgers and time
stamps of every request.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.common.paired_comparison import Added, added, drift, levelled
from loadtest.common.tables import table
from loadtest.processes.telemetry_processes import ProcessPlacement
from loadtest.telemetry.telemetry_steps import BATCHES, StepTurn, measure_steps
from loadtest.telemetry.telemetry_streams import NUM_STREAMS, NUM_TOKENS, STEP_S, USES, StreamTurn, measure_streams

LIMIT = 0.03
"""The most that telemetry may add, as a share."""
ROUND_S = 1.0
"""Seconds of each side's steps in a round; the side with telemetry is scraped once per round."""


class TelemetryReport(msgspec.Struct, kw_only=True):
    """All rounds of the benchmark: of steps by batch size, and of streams by what is in use (`TelemetryUse.name`).

    `step_s` is the assumed time of the model in a step; `stream_step_s` the interval between two tokens of a stream.
    """

    step_s: float
    stream_step_s: float
    before: str
    steps: dict[int, list[tuple[StepTurn, StepTurn]]]
    streams: dict[str, list[tuple[StreamTurn, StreamTurn]]]


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    core = (cores[-1] if len(cores) > 1 else -1) if args.core is None else args.core
    if len(cores) > 1:
        os.sched_setaffinity(0, set(cores) - {core})
    place = ProcessPlacement(core, args.before)
    launches, num_rounds = (1, 4) if args.quick else (args.launches, args.rounds)
    report = TelemetryReport(
        step_s=args.step_ms / 1e3,
        stream_step_s=args.stream_step_ms / 1e3,
        before=str(args.before or ""),
        steps={batch: [] for batch in BATCHES if args.only != "streams"},
        streams={use.name: [] for use in USES if args.only != "steps"},
    )
    for _ in range(launches):
        if args.only != "streams":
            for batch, pairs in measure_steps(place, num_rounds, ROUND_S).items():
                report.steps[batch] += pairs
        for use in USES if report.streams else ():
            report.streams[use.name] += measure_streams(place, num_rounds, report.stream_step_s, use)
    sys.stdout.write(text(report))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest telemetry", description="Measure what telemetry adds.")
    parser.add_argument("--quick", action="store_true", help="one launch")
    parser.add_argument("--launches", type=int, default=6, help="of fresh processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="of each launch (default: %(default)s)")
    parser.add_argument("--only", choices=("steps", "streams"), help="leave out the others")
    parser.add_argument("--core", type=int, help="of what is measured (default: the last one)")
    parser.add_argument("--before", type=Path, metavar="DIRECTORY", help="a checkout that the side without runs")
    parser.add_argument(
        "--step-ms", type=float, default=2.0, help="what the model takes of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--stream-step-ms",
        type=float,
        default=1e3 * STEP_S,
        help="between two tokens of a stream; 0: as fast as the gateway takes them (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds there too")
    return parser


def text(report: TelemetryReport) -> str:
    without = f"the commit in {report.before}" if report.before else "nobody looking and nothing counted"
    heads = ["", "without, us", "with, us", "added, us", "added", "95%", f"of {LIMIT:.0%}", "pairs"]
    rows = []
    for batch, pairs in report.steps.items():
        costs, _ = levelled([(off.step, on.step) for off, on in pairs])
        spent = [(off + report.step_s, on + report.step_s) for off, on in costs]
        rows.append(_row(f"a step of {batch}", added(spent), report.step_s))
    streams = "\n"
    if report.streams:
        found = {use: levelled([(off.token, on.token) for off, on in pairs]) for use, pairs in report.streams.items()}
        tokens = {use: added(costs) for use, (costs, _) in found.items()}
        rows += [_row(f"a streamed token, {use}", token, 0.0) for use, token in tokens.items()]
        token = tokens[USES[-1].name]
        powers = " and ".join(f"{power:.2f}" for _, power in found.values())
        drifts = [drift([(off.token, on.token) for off, on in pairs]) for pairs in report.streams.values()]
        longer = " and ".join(f"{each.share:+.2%} ({each.low:+.2%} to {each.high:+.2%})" for each in drifts)
        streams = (
            f" Streams: {NUM_STREAMS} of {NUM_TOKENS} tokens each, one every {report.stream_step_s * 1e3:g} ms; a core"
            f" is enough for {1 / token.off:,.0f} tokens/s without and {1 / token.on:,.0f} with all of it. Their turns"
            f" are compared as on a core of one speed; they follow its core-speed probe by the power {powers}, and"
            f" beside telemetry that is longer by {longer}.\n"
        )
    return (
        f"What telemetry adds, in processor time; without: {without}.\n\n{table(heads, rows)}\n"
        f"A step is the engine's own work and {report.step_s * 1e3:g} ms of a model's.{streams}"
    )


def _row(name: str, found: Added, model_s: float) -> list[str]:
    off, on = (seconds - model_s for seconds in (found.off, found.on))
    return [
        name,
        f"{off * 1e6:.1f}",
        f"{on * 1e6:.1f}",
        f"{found.share * found.off * 1e6:+.1f}",
        f"{found.share:+.2%}",
        f"{found.low:+.2%} to {found.high:+.2%}",
        found.verdict(LIMIT),
        str(found.num_pairs),
    ]
