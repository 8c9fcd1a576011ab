"""Measure what a gateway computes to choose and record the pairs that it tests as workers join one after the other.

    python -m loadtest joins [--workers 100,300,1000]

Half of the workers prefill and half decode, in one zone. Every test succeeds at once, so the times hold no transfers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from loadtest.common.tables import table
from tandem.core.config import Pool
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.worker_load import WorkerLoad
from tandem.routing.pd_pairs import PairRegistry
from tandem.routing.worker_view import WorkerView


class _Joins(NamedTuple):
    """`num_tests`: pairs that moved a test block. `num_linked`: pairs that may be used after the last worker.
    `total_s`, `worst_s`: processor time of all joins and of the slowest."""

    num_tests: int
    num_linked: int
    total_s: float
    worst_s: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest joins", description="Time the choice of pairs as workers join.")
    parser.add_argument("--workers", default="100,300,1000")
    args = parser.parse_args(argv)
    rows = [
        (number, str(joins.num_tests), str(joins.num_linked), f"{joins.total_s:.2f}", f"{1e3 * joins.worst_s:.1f}")
        for number in args.workers.split(",")
        for joins in [_joins(int(number))]
    ]
    sys.stdout.write(table(("workers", "tests", "linked pairs", "processor s", "slowest join, ms"), rows))
    return 0


def _joins(num_workers: int) -> _Joins:
    pairs, views, took, num_tests = PairRegistry("prefer"), list[WorkerView](), list[float](), 0
    for number in range(num_workers):
        views.append(_worker(number))
        began = time.process_time()
        for pair, _ in pairs.due(views, float(number)):
            pairs.ended(pair, moved=True, retry_at=0.0)
            num_tests += 1
        took.append(time.process_time() - began)
    return _Joins(num_tests, len(pairs.linked), sum(took), max(took))


def _worker(number: int) -> WorkerView:
    pool: Pool = "decode" if number % 2 else "prefill"
    return WorkerView(WorkerRef(WorkerId(f"w{number:04}"), Incarnation(1), ""), pool, "m", "f", WorkerLoad())
