"""Measure in virtual time how fast running sequences spread again after a decode worker was replaced.

    python -m loadtest rebalance [--requests 64] [--outputs 6000] [--model llama-3.1-8b] [--hardware h200]

Two decode workers run the same number of long answers. One of them drains, so that all answers migrate to the other,
and a new worker takes its place. The same run is simulated without the drain, with gateway.rebalance off, and with it
on. A gap is the time between two tokens of one answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from loadtest.common.stats import percentile
from loadtest.common.tables import ms, table
from tandem.core.config import Config, EngineConfig, GatewayConfig
from tandem.core.ids import RequestId
from tandem.core.request import Request, SamplingParams
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.faults import Fault
from tandem.sim.cost.hardware import HARDWARE
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.cost.roofline import Roofline
from tandem.sim.machines.deployment import Deployment, parse_pools
from tandem.sim.machines.machine import roofline_machine
from tandem.sim.simulate import rare_garbage_collection
from tandem.workload.scheduled_request import MODEL, ScheduledRequest

ARRIVALS_S = 4.0
"""Seconds within which all requests arrive."""
DRAIN_AT_S = 10.0
DRAIN_S = 30.0
"""Most seconds that the drain may take; the new worker runs as soon as the drain has ended."""
AS_GOOD = 1.2
"""A window is as good as without a drain if its p99 gap is at most this many times longer."""
WINDOW_S = 1.0
LOOKS_S = (1, 3, 10, 30)


@dataclass(frozen=True, slots=True)
class Spread:
    """Results of one run.

    `gaps_s`: for each second of the run, the p99 gap of all answers. `longest_s`: the longest gap after the drain.
    `num_moves`: migrations after those of the drain. `first_end`, `last_end`: when the first and the last answer ended.
    """

    gaps_s: tuple[float, ...]
    longest_s: float
    num_moves: int
    first_end: float
    last_end: float


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    with rare_garbage_collection():
        calm = measure(args, "off", drains=False)
        runs = {mode: measure(args, mode, drains=True) for mode in ("off", "on")}
    rows = [_row("no drain", calm, calm), *(_row(f"gateway.rebalance={mode}", run, calm) for mode, run in runs.items())]
    heads = ["run", *(f"p99 gap {after} s after the drain, ms" for after in LOOKS_S), "longest gap, ms",
             f"p99 within {AS_GOOD} x after, s", "moves", "all answers after, s"]  # fmt: skip
    sys.stdout.write(table(heads, rows))
    return 0


def measure(args: argparse.Namespace, mode: Literal["off", "on"], *, drains: bool) -> Spread:
    """Simulate one run to its end. Raises AssertionError where a request fails or anything is left over."""
    config = Config(
        engine=EngineConfig(max_num_seqs=2 * args.requests, max_num_batched_tokens=8192),
        gateway=GatewayConfig(rebalance=mode, progress_timeout_s=1e6),
    )
    machine = roofline_machine(Roofline(SHAPES[args.model], HARDWARE[args.hardware]))
    cluster = SimCluster(Deployment(machine=machine, pools=parse_pools("prefill=1,decode=2"), config=config).cluster(0))
    traces: list[ClientTrace] = []
    fault = Fault(at_s=DRAIN_AT_S, kind="drain", worker=1, lasts_s=DRAIN_S)
    cluster.run(_requests(args), traces.append, faults=[fault] if drains else [])
    cluster.check()
    assert all(trace.is_complete for trace in traces), [trace.outcome for trace in traces if not trace.is_complete]
    gaps = sorted((later, later - earlier) for trace in traces for earlier, later in pairwise(trace.token_times))
    ends = sorted(trace.ended_at for trace in traces)
    windows: list[list[float]] = [[] for _ in range(int(ends[-1] / WINDOW_S) + 1)]
    for at, gap in gaps:
        windows[int(at / WINDOW_S)].append(gap)
    retries = [int(trace.path.partition("retries=")[2] or 0) for trace in traces]
    num_drained = args.requests // 2 if drains else 0
    p99 = tuple(percentile(window, 0.99) if window else 0.0 for window in windows)
    return Spread(p99, max(gap for at, gap in gaps if at > DRAIN_AT_S), sum(retries) - num_drained, ends[0], ends[-1])


def _requests(args: argparse.Namespace) -> list[ScheduledRequest]:
    found: list[ScheduledRequest] = []
    for i in range(args.requests):
        sampling = SamplingParams(max_tokens=args.outputs, temperature=0.0, seed=i)
        prompt = tuple((7 * i + 13 * j) % 30_000 for j in range(args.tokens))
        request = Request(id=RequestId(f"long-{i}"), model=MODEL, prompt_tokens=prompt, sampling=sampling)
        found.append(ScheduledRequest(request, "long", i * ARRIVALS_S / args.requests))
    return found


def _row(name: str, run: Spread, calm: Spread) -> list[str]:
    first = int(DRAIN_AT_S / WINDOW_S)
    looks = [ms(run.gaps_s[first + after]) if first + after < len(run.gaps_s) else "" for after in LOOKS_S]
    return [name, *looks, ms(run.longest_s), _good_after(run, calm), str(run.num_moves), f"{run.last_end:.1f}"]


def _good_after(run: Spread, calm: Spread) -> str:
    """Return the seconds from the drain after which no window was worse than `AS_GOOD` times that without a drain.

    Compared are the windows in which all answers run."""
    pairs = list(zip(run.gaps_s, calm.gaps_s, strict=False))[
        int(DRAIN_AT_S / WINDOW_S) : int(calm.first_end / WINDOW_S)
    ]
    bad = [number for number, (ours, theirs) in enumerate(pairs, 1) if ours > AS_GOOD * theirs]
    if not bad:
        return "0"
    return f"{bad[-1] * WINDOW_S:.0f}" if bad[-1] < len(pairs) else "never"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest rebalance", description="Measure the spread of running sequences.")
    parser.add_argument("--requests", type=int, default=64, help="long answers (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1000, help="of each prompt (default: %(default)s)")
    parser.add_argument("--outputs", type=int, default=6000, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-3.1-8b", help="(default: %(default)s)")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h200", help="(default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
