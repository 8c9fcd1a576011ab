"""What a simulated request costs against the size of the cluster: time, events and memory; never checks what a run
says of latency.

Everything per worker is the same at each size: requests per second, KV blocks, prompt and output lengths. So a curve
that rises says what grows faster than the cluster. One process simulates one cluster, on one core.
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

from tandem.core.config import Config, EngineConfig, GatewayConfig
from tandem.routing.worker_view import Pool
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import ClusterSpec, SimCluster
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
class Asked:
    """One point of the curve. `max_run` is how many steps a worker looks at ahead."""

    workers: int
    requests: int
    pools: str
    rate: float
    seed: int
    max_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """Processor and wall seconds are of the run, without building the cluster; `rss_mb` is the most that the process
    held. `num_complete` of the requests ended well. `answers` names what every client saw, in any order."""

    asked: Asked
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
        """Of one request."""
        return 1e3 * self.cpu_s / self.asked.requests


def main(argv: Sequence[str]) -> int:
    asked = _parsed(argv)
    sizes = [int(size) for size in asked.workers.split(",")]
    points: list[ScalePoint] = []
    sys.stdout.write(_HEADER)
    for size in sizes:
        one = Asked(
            workers=size,
            requests=asked.requests,
            pools=asked.pools,
            rate=asked.rate,
            seed=asked.seed,
            max_run=asked.max_run,
        )
        # A process each: the most memory that a process held does not go down again.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            points.append(pool.apply(measure, (one,)))
        sys.stdout.write(_row(points[-1]))
        sys.stdout.flush()
    if asked.json:
        Path(asked.json).write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    return 0 if all(point.num_complete == point.asked.requests for point in points) else 1


def measure(asked: Asked) -> ScalePoint:
    """Build, run, check the books. Raises AssertionError when a request has no end or a book is off."""
    cluster = SimCluster(ClusterSpec(workers=workers_of(asked), gateway=GatewayConfig(), seed=asked.seed))
    tally = _Tally(cluster)
    began, cpu = time.perf_counter(), time.process_time()
    with rare_garbage_collection():
        cluster.run(poisson([GROUP], asked.seed, asked.requests, asked.rate * asked.workers), tally.add)
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - began
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cluster.check()
    assert tally.num_ended == asked.requests, f"{tally.num_ended} of {asked.requests} requests have an end"
    return ScalePoint(
        asked=asked,
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


def workers_of(asked: Asked) -> tuple[tuple[WorkerSpec, int], ...]:
    """Half prefill and half decode, or all mixed."""
    config = Config(engine=EngineConfig(max_num_batched_tokens=2048, max_num_seqs=256))

    def kind(pool: Pool) -> WorkerSpec:
        spec = WorkerSpec.of(pool, ROOFLINE, config)
        return replace(spec, max_run=asked.max_run)

    if asked.pools == "mixed":
        return ((kind("mixed"), asked.workers),)
    num_prefill = asked.workers // 2
    return (kind("prefill"), num_prefill), (kind("decode"), asked.workers - num_prefill)


class _Tally:
    """Adds requests up as they end and keeps none."""

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
            self._tell()

    def _tell(self) -> None:
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
    count = point.asked.requests
    return (
        f"{point.asked.workers:>8,} {count:>9,} {point.cpu_ms:>11.2f} {point.num_events / count:>8.1f} "
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
