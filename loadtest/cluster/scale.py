"""Measure what a simulated request costs against the size of the cluster: time, events and memory.

Everything per worker is the same at each size: requests per second, KV blocks, prompt and output lengths. So a rising
curve shows a cost that grows faster than the cluster. One process simulates one cluster, on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tandem.core.config import Config, EngineConfig, GatewayConfig, Pool
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.hardware import H200
from tandem.sim.cost.model_shapes import LLAMA_8B
from tandem.sim.cost.roofline import Efficiency, Roofline
from tandem.sim.simulate import rare_garbage_collection
from tandem.workload.mix import poisson
from tandem.workload.request_class import RequestClass

GROUP = RequestClass("trace", 1.0, (1000, 8000), (150, 250))
"""Tokens in and out, as long as those of published production traces."""
RATE = 3.5
"""Requests per second and worker: about two thirds of what the prefill workers of a split cluster can compute."""
ROOFLINE = Roofline(LLAMA_8B, H200, efficiency=Efficiency(overhead_s=1.5e-3))
PROGRESS_REQUESTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    """Settings of one point of the curve; `max_run` is how many steps a worker may simulate ahead of the clock."""

    workers: int
    requests: int
    pools: str
    rate: float
    seed: int
    max_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """Results of one point of the curve.

    Processor and wall seconds cover the run without building the cluster; `rss_mb` is the process's peak.
    `num_complete` of the requests ended well. `answers` is a digest of what every client received, independent of
    order.
    """

    settings: ScaleSettings
    cpu_s: float
    wall_s: float
    virtual_s: float
    num_events: int
    num_steps: int
    num_tokens: int
    num_complete: int
    rss_mb: float
    digest: str
    answers: str

    @property
    def cpu_ms(self) -> float:
        """Return the processor milliseconds that one simulated request costs."""
        return 1e3 * self.cpu_s / self.settings.requests


def main(argv: Sequence[str]) -> int:
    args = _parsed(argv)
    sizes = [int(size) for size in args.workers.split(",")]
    points: list[ScalePoint] = []
    sys.stdout.write(_HEADER)
    for size in sizes:
        settings = ScaleSettings(
            workers=size,
            requests=args.requests,
            pools=args.pools,
            rate=args.rate,
            seed=args.seed,
            max_run=args.max_run,
        )
        # Each point gets a process, because a process's peak memory does not go down again.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            points.append(pool.apply(measure, (settings,)))
        sys.stdout.write(_row(points[-1]))
        sys.stdout.flush()
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    return 0 if all(point.num_complete == point.settings.requests for point in points) else 1


def measure(settings: ScaleSettings) -> ScalePoint:
    """Build and run a simulated cluster, and return what it cost.

    Raises AssertionError when a request has not ended or blocks are left over.
    """
    cluster = SimCluster(ClusterSpec(workers=workers_of(settings), gateway=GatewayConfig(), seed=settings.seed))
    tally = _Tally(cluster)
    began, cpu = time.perf_counter(), time.process_time()
    with rare_garbage_collection():
        cluster.run(poisson([GROUP], settings.seed, settings.requests, settings.rate * settings.workers), tally.add)
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - began
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cluster.check()
    assert tally.num_ended == settings.requests, f"{tally.num_ended} of {settings.requests} requests have an end"
    return ScalePoint(
        settings=settings,
        cpu_s=cpu_s,
        wall_s=wall_s,
        virtual_s=cluster.now,
        num_events=cluster.num_events,
        num_steps=sum(worker.num_steps for worker in cluster.workers),
        num_tokens=tally.num_tokens,
        num_complete=tally.num_complete,
        rss_mb=rss_mb,
        digest=cluster.digest,
        answers=f"{tally.answers:032x}",
    )


def workers_of(settings: ScaleSettings) -> tuple[tuple[WorkerSpec, int], ...]:
    """Return the specs of the workers with their numbers: half prefill and half decode, or all mixed."""
    config = Config(engine=EngineConfig(max_num_batched_tokens=2048, max_num_seqs=256))

    def kind(pool: Pool) -> WorkerSpec:
        spec = WorkerSpec.of(pool, ROOFLINE, config)
        return replace(spec, max_run=settings.max_run)

    if settings.pools == "mixed":
        return ((kind("mixed"), settings.workers),)
    num_prefill = settings.workers // 2
    return (kind("prefill"), num_prefill), (kind("decode"), settings.workers - num_prefill)


class _Tally:
    """Sums requests up as they end and keeps none."""

    def __init__(self, cluster: SimCluster) -> None:
        self.num_ended = 0
        self.num_complete = 0
        self.num_tokens = 0
        self.answers = 0
        self._cluster = cluster
        self._began = time.perf_counter()

    def add(self, trace: ClientTrace) -> None:
        self.num_ended += 1
        self.num_complete += trace.is_complete
        self.num_tokens += len(trace.token_times)
        seen = f"{trace.id} {trace.outcome!r} {trace.path}".encode() + trace.token_times.tobytes()
        self.answers ^= int.from_bytes(hashlib.blake2b(seen, digest_size=16).digest(), "little")
        if self.num_ended % PROGRESS_REQUESTS == 0:
            self._print_progress()

    def _print_progress(self) -> None:
        wall_s = time.perf_counter() - self._began
        rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        sys.stderr.write(
            f"{self.num_ended:>9,} requests  {wall_s:8.0f} s  {1e3 * wall_s / self.num_ended:6.2f} ms each  "
            f"virtual {self._cluster.now:8.1f} s  {rss_mb:8.0f} MB\n"
        )
        sys.stderr.flush()


_HEADER = (
    f"{'workers':>8} {'requests':>9} {'ms/request':>11} {'events':>8} {'steps':>8} {'RSS MB':>8} {'virtual s':>10} "
    f"{'wall s':>8} {'real/virt':>9}\n"
)


def _row(point: ScalePoint) -> str:
    count = point.settings.requests
    return (
        f"{point.settings.workers:>8,} {count:>9,} {point.cpu_ms:>11.2f} {point.num_events / count:>8.1f} "
        f"{point.num_steps / count:>8.1f} {point.rss_mb:>8,.0f} {point.virtual_s:>10.1f} {point.wall_s:>8.1f} "
        f"{point.wall_s / point.virtual_s:>9.1f}\n"
    )


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest scale", description=__doc__)
    parser.add_argument("--workers", default="10,100,1000", help="sizes of the cluster")
    parser.add_argument("--requests", type=int, default=20_000, help="at each size")
    parser.add_argument(
        "--pools", choices=("split", "mixed"), default="split", help="half prefill, half decode; or mixed"
    )
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second and worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-run", type=int, default=64, help="steps that a worker looks at ahead; 1: none")
    parser.add_argument("--json", metavar="FILE", help="write the points for a program to read")
    return parser.parse_args(argv)
