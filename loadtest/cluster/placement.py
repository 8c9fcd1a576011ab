"""Measure the time of one placement against the number of workers.

    python -m loadtest placement [--workers 8,64,1024]

Half of the workers prefill and half decode; all are linked and busy to different degrees; every eighth holds a part of
the prompt. Between two placements the view of the chosen worker changes, as in a gateway.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median, quantiles

from loadtest.common.tables import table
from tandem.core.clock import SystemClock
from tandem.core.config import Disaggregation, Pool
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.routing.pd_pairs import PairRegistry
from tandem.routing.placement import Placement
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.router import place
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import WorkerView

STEPS = StepCost(2e-3, 3e-5, 2e-5, 1e-8, 1e-9)
NUM_PLACEMENTS = 2000
NUM_PROMPT = 8000
VARIANTS: tuple[tuple[Disaggregation, bool], ...] = (("prefer", False), ("prefer", True), ("auto", True))


class PlacementWorkers:
    def __init__(self, num_workers: int) -> None:
        self.views = {view.ref: view for view in map(_worker, range(num_workers))}
        pairs = PairRegistry("prefer")
        for pair, _ in pairs.due(self.views.values(), 0.0):
            pairs.ended(pair, moved=True, retry_at=0.0)
        self.ranking = WorkerRanking(pairs.linked, pairs.failed.keys(), pairs.refused.keys())
        for ref in self.views:
            self.ranking.put(partial(self.views.__getitem__, ref))
        self.hits = {ref: PrefixHit(50 + i % 400, 50) for i, ref in enumerate(self.views) if i % 8 in (0, 1)}

    def place(self, number: int, mode: Disaggregation, *, has_hits: bool) -> None:
        hits = self.hits if has_hits else {}
        placed = place(
            self.ranking,
            RoutingRequest("m", NUM_PROMPT, num_prompt=NUM_PROMPT, hits=hits, key=f"r{number}", mode=mode),
        )
        assert isinstance(placed, Placement), placed
        view = self.views[placed.prefill]
        load = replace(view.load, num_queued_tokens=(view.load.num_queued_tokens + 700) % 30_000)
        self.views[placed.prefill] = replace(view, load=load)
        self.ranking.put(partial(self.views.__getitem__, placed.prefill))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest placement", description="Time one placement.")
    parser.add_argument("--workers", default="8,64,1024")
    args = parser.parse_args(argv)
    rows = [
        (f"{number} workers, {mode}{', hits' if has_hits else ''}", *_timed(int(number), mode, has_hits=has_hits))
        for number in args.workers.split(",")
        for mode, has_hits in VARIANTS
    ]
    sys.stdout.write(table(("placement", "p50, us", "p99, us"), rows))
    return 0


def _timed(num_workers: int, mode: Disaggregation, *, has_hits: bool) -> tuple[str, str]:
    fleet, clock = PlacementWorkers(num_workers), SystemClock()
    took = []
    for number in range(NUM_PLACEMENTS):
        began = clock.now()
        fleet.place(number, mode, has_hits=has_hits)
        took.append(clock.now() - began)
    return f"{1e6 * median(took):.0f}", f"{1e6 * quantiles(took, n=100)[-1]:.0f}"


def _worker(number: int) -> WorkerView:
    ref = WorkerRef(WorkerId(f"w{number:04}"), Incarnation(1), "")
    load = WorkerLoad(
        num_running=number % 17,
        num_queued_tokens=number * 7919 % 20_000,
        num_blocks=50_000,
        num_free_blocks=20_000 + number,
    )
    pool: Pool = "decode" if number % 2 else "prefill"
    return WorkerView(ref, pool, "m", "f", load, step_cost=STEPS, block_size=16, block_bytes=2 << 20)
