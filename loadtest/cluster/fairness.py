"""Compare charges for KV time in virtual time: what each tenant gets while several of them wait, with the real queue.

    python -m loadtest fairness [--workload cached-documents] [--charges 0,40] [--count 1200]

Every charge (`gateway.kv_time_tokens`) gets the same requests and workers. Counted is what happens from `--from-s` to
`--until-s`, when requests wait all the time: by the end of a run every tenant has got all that it has asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.common.tables import ms, table
from tandem.admission.fairness_window import jain_index
from tandem.core.clock import SystemClock
from tandem.core.config import Bytes, Config, EngineConfig, GatewayConfig
from tandem.core.events import Finished
from tandem.core.quantile_sketch import QuantileSketch
from tandem.core.slo import Slo
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cost.hardware import HARDWARE
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.cost.roofline import Roofline
from tandem.sim.machines.deployment import Deployment, parse_pools
from tandem.sim.machines.machine import roofline_machine
from tandem.sim.report.report import LatencyStats
from tandem.sim.simulate import rare_garbage_collection, simulate
from tandem.workload.source import open_workload

HOST_CACHE = 64 << 30
"""Bytes of host memory of each worker, which keep documents cached that running requests have pushed out of the KV
pool."""
SAMPLE_S = 0.5


@dataclass(slots=True)
class TenantShare:
    """Hold what one tenant got during the counted time.

    `num_tokens`: computed prompt tokens and sampled ones. `kv_samples`: sum over the samples of the KV tokens that its
    requests at workers needed.
    """

    num_tokens: int = 0
    num_output: int = 0
    kv_samples: int = 0
    ttft: QuantileSketch = field(default_factory=QuantileSketch)


class Observer:
    """Count what each tenant gets from `begin_s` to `end_s` of virtual time."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s = begin_s
        self.end_s = end_s
        self.num_samples = 0
        self.tenants: defaultdict[str, TenantShare] = defaultdict(TenantShare)
        self._sample_at = begin_s

    def each(self, trace: ClientTrace) -> None:
        """Count a request that has ended."""
        if not trace.token_times:
            return
        share = self.tenants[trace.tenant]
        num_output = sum(map(self._counts, trace.token_times))
        share.num_output += num_output
        share.num_tokens += num_output
        if self._counts(trace.token_times[0]) and isinstance(trace.outcome, Finished):
            share.num_tokens += trace.num_prompt - trace.outcome.num_cached_tokens
        if self._counts(trace.due_s):
            share.ttft.add(trace.ttft_s)

    def look(self, cluster: SimCluster, _: LatencyStats) -> None:
        """Sample the KV that requests need, at most every `SAMPLE_S` seconds."""
        if self._sample_at <= cluster.now < self.end_s:
            self._sample_at = cluster.now + SAMPLE_S
            self.num_samples += 1
            for tenant, num_tokens in cluster.num_kv_tokens().items():
                self.tenants[tenant].kv_samples += num_tokens

    def _counts(self, time_s: float) -> bool:
        return self.begin_s <= time_s < self.end_s


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    charges = [float(text) for text in args.charges.split(",")]
    rows: list[tuple[str, ...]] = []
    for charge in charges:
        clock = SystemClock()
        began = clock.now()
        rows += rows_of(charge, observe(args, charge), max(charges))
        sys.stderr.write(f"{charge:g}: {clock.now() - began:.0f} s\n")
    index = "Jain's index of dominant shares"
    head = ("kv_time_tokens", "tenant", "TTFT p50 / p99, ms", "tokens/s", "sampled/s", "KV", index)
    sys.stdout.write(table(head, rows))
    return 0


def observe(args: argparse.Namespace, charge: float) -> Observer:
    """Simulate one charge to the end, and return what the tenants got. Raises AssertionError when requests or blocks
    are left over."""
    config = Config(
        engine=EngineConfig(host_cache_memory=Bytes(HOST_CACHE)),
        gateway=GatewayConfig(max_queued=10**6, queue_timeout_s=1e6, progress_timeout_s=1e6, kv_time_tokens=charge),
    )
    machine = roofline_machine(Roofline(SHAPES["llama-3.1-8b"], HARDWARE[args.hardware]))
    deployment = Deployment(machine=machine, pools=parse_pools(args.pools), config=config)
    requests = open_workload(args.workload, seed=args.seed, count=args.count, rate=args.rate)
    observer = Observer(args.from_s, args.until_s)
    with rare_garbage_collection():
        simulate(deployment.cluster(args.seed), requests, Slo(), each=observer.each, look=observer.look)
    return observer


def rows_of(charge: float, found: Observer, rate: float) -> list[tuple[str, ...]]:
    """Return a row for each tenant. `rate`: the charge by which the index of dominant shares compares KV time with
    tokens."""
    seconds = found.end_s - found.begin_s
    kv = Counter({tenant: share.kv_samples / max(1, found.num_samples) for tenant, share in found.tenants.items()})
    dominant = [max(share.num_tokens / seconds, kv[tenant] * rate / 1000) for tenant, share in found.tenants.items()]
    return [
        (
            f"{charge:g}",
            tenant,
            f"{ms(share.ttft.percentile(0.5))} / {ms(share.ttft.percentile(0.99))}",
            f"{share.num_tokens / seconds:,.0f}",
            f"{share.num_output / seconds:,.0f}",
            f"{kv[tenant] / sum(kv.values()):.0%}",
            f"{jain_index(dominant):.3f}",
        )
        for tenant, share in sorted(found.tenants.items())
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest fairness", description="Compare charges for KV time.")
    parser.add_argument("--charges", default="0,40", help="values of gateway.kv_time_tokens (default: 0,40)")
    parser.add_argument("--workload", default="cached-documents", help="a mix, or a file of one or of a trace")
    parser.add_argument("--rate", type=float, default=None, help="requests per second (default: the mix's own)")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="l40s")
    parser.add_argument("--pools", default="mixed=2")
    parser.add_argument("--count", type=int, default=1200, help="requests (default: 1200)")
    parser.add_argument("--from-s", type=float, default=40.0, help="begin of what is counted (default: 40)")
    parser.add_argument("--until-s", type=float, default=115.0, help="end of what is counted (default: 115)")
    parser.add_argument("--seed", type=int, default=0)
    return parser
