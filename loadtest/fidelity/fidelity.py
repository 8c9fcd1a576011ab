"""Measure the error of the simulator: fitted on one real run, it predicts others.

    python -m loadtest fidelity --directory DIR [--topology mixed|split] [--count 200] [--rate 0.6] [--profile FILE]

Run A, of one seed, is what step times are fitted on. Run B, of another seed, is measured several times and predicted
from the fit alone; then replayed with its own step times, which excludes the fit's errors. Needs an idle machine for
half an hour; stored runs in the directory are not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from loadtest.bench.systems_under_test import Failure
from loadtest.common.stats import percentile
from loadtest.fidelity.predictions import Times, predicted, profile_from, replayed, times_of
from loadtest.fidelity.recorded_runs import RecordedLoad, RunConfig, StoredRun, kept
from loadtest.processes.systems import NotStarted
from tandem.core.clock import Clock, SystemClock
from tandem.sim.machines.profile import encode_profile

CHUNK = ("--max-num-batched-tokens", "256")
TOPOLOGIES = {
    "mixed": RunConfig("mixed", ("--mixed", "1", *CHUNK)),
    "split": RunConfig("split", ("--mixed", "0", "--prefill", "1", "--decode", "1", *CHUNK)),
}
NUM_SIMULATIONS = 9
"""Number of simulations with different residuals; the prediction is their median."""
ALLOWED = {"TTFT p50": 0.15, "TTFT p99": 0.25, "ITL p50": 0.15, "ITL p99": 0.25}
"""Allowed relative errors. At p99 the spread of the real runs counts where that is larger."""
ALLOWED_REPLAY = 0.05


class FidelityRow(NamedTuple):
    """One latency figure in seconds: of the real runs, of the simulations, and of each real run's replay.

    `unlike` is the largest share of a replay's steps for which the run's log had no similar step; if it is large, the
    replay says little.
    """

    name: str
    real: list[float]
    simulated_s: list[float]
    replays: list[float]
    unlike: float

    @property
    def error(self) -> float:
        return statistics.median(self.simulated_s) / statistics.median(self.real) - 1

    @property
    def spread(self) -> float:
        return (max(self.real) - min(self.real)) / statistics.median(self.real)

    @property
    def allowed(self) -> float:
        return max(ALLOWED[self.name], self.spread) if self.name.endswith("p99") else ALLOWED[self.name]

    @property
    def replay_error(self) -> float:
        """Return the largest relative error of the replays, with its sign."""
        return max((replayed / real - 1 for replayed, real in zip(self.replays, self.real, strict=True)), key=abs)

    @property
    def holds(self) -> bool:
        return abs(self.error) <= self.allowed and abs(self.replay_error) <= ALLOWED_REPLAY


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest fidelity", description="The simulator against the real engine.")
    parser.add_argument("--directory", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--topology", choices=sorted(TOPOLOGIES), default="mixed")
    parser.add_argument("--count", type=int, default=200, help="requests of a run (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.6, help="of them per second (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 2), metavar=("A", "B"))
    parser.add_argument("--turns", type=int, default=3, help="real runs of B (default: %(default)s)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write the fit of A there, with its error")
    args = parser.parse_args(argv)
    args.directory.mkdir(parents=True, exist_ok=True)
    try:
        return asyncio.run(_compare(args, SystemClock()))
    except (Failure, NotStarted) as error:
        sys.stderr.write(f"loadtest fidelity: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


async def _compare(args: argparse.Namespace, clock: Clock) -> int:
    topology, (seed_a, seed_b) = TOPOLOGIES[args.topology], args.seeds
    a = await kept(topology, RecordedLoad(seed_a, args.count, args.rate), args.directory, clock)
    turns = range(args.turns)
    runs = [
        await kept(topology, RecordedLoad(seed_b, args.count, args.rate, turn), args.directory, clock) for turn in turns
    ]
    rows = compare(a, runs)
    sys.stdout.write(markdown(rows, len(runs)) + "\n")
    if args.profile:
        day = datetime.fromtimestamp(a.run.began_unix_s, UTC).date()
        profile = profile_from(a, f"{topology.name}, {args.count} requests of the mix at {args.rate:g}/s, {day}")
        args.profile.write_text(encode_profile(replace(profile, fidelity=fidelity_text(rows, len(runs)))))
    return 0 if all(row.holds for row in rows) else 1


def compare(a: StoredRun, runs: Sequence[StoredRun]) -> list[FidelityRow]:
    """Fit a profile on the run `a`, predict and replay the runs `runs` of one load, and return a row for each
    figure."""
    profile = profile_from(a, "")
    real = [_figures(times_of(run.run.records)) for run in runs]
    simulated = [_figures(predicted(profile, runs[0], repetition)) for repetition in range(NUM_SIMULATIONS)]
    again = [replayed(run) for run in runs]
    replays, unlike = [_figures(times) for times in again], max(times.unlike for times in again)
    return [
        FidelityRow(name, [f[name] for f in real], [f[name] for f in simulated], [f[name] for f in replays], unlike)
        for name in ALLOWED
    ]


def _figures(times: Times) -> dict[str, float]:
    return {
        "TTFT p50": percentile(times.ttft, 0.5),
        "TTFT p99": percentile(times.ttft, 0.99),
        "ITL p50": percentile(times.gaps, 0.5),
        "ITL p99": percentile(times.gaps, 0.99),
    }


def markdown(rows: Sequence[FidelityRow], num_runs: int) -> str:
    lines = [
        f"| ms | real, median of {num_runs} (range) | predicted, median of {NUM_SIMULATIONS} (range) | error | allowed "
        "| replay's error | |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        verdict = "holds" if row.holds else "does not hold"
        lines.append(
            f"| {row.name} | {_ms(row.real)} | {_ms(row.simulated_s)} | {row.error:+.1%} | {row.allowed:.0%} "
            f"| {row.replay_error:+.1%} | {verdict} |"
        )
    lines += ["", f"Steps of the replays without a like one in their run: {rows[0].unlike:.1%}."]
    return "\n".join(lines)


def fidelity_text(rows: Sequence[FidelityRow], num_runs: int) -> str:
    """Return one sentence on the prediction errors, which is stored in a profile and printed in every report."""
    errors = ", ".join(f"{row.name} {row.error:+.0%}" for row in rows)
    return f"predicted {num_runs} real runs of another seed with errors of {errors}"


def _ms(values: Sequence[float]) -> str:
    low, middle, high = (value * 1e3 for value in (min(values), statistics.median(values), max(values)))
    return f"{middle:,.1f} ({low:,.1f}-{high:,.1f})"
