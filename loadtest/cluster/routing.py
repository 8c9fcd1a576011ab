"""Compare routing policies on one trace in virtual time, with the real router.

    TANDEM_TRACES=DIR python -m loadtest routing [--pools prefill=4,decode=4] [--speedup 3] [--count 12031]
        [--no-remote-prefix]
    python -m loadtest routing --workload agent --rate 6 --speedup 1 --count 400

Every policy gets the same requests, workers and prefix index. Prompts are those of Mooncake's conversation trace (Qin
et al., FAST 2025), whose blocks of 512 tokens identify shared prefixes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from loadtest.common.tables import ms, table
from tandem.core.clock import SystemClock
from tandem.core.config import Config, Disaggregation, EngineConfig, GatewayConfig, RoutingPolicy
from tandem.core.slo import Slo
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cost.hardware import HARDWARE
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.cost.roofline import Roofline
from tandem.sim.machines.deployment import Deployment, parse_pools
from tandem.sim.machines.machine import roofline_machine
from tandem.sim.report.report import SimulationReport
from tandem.sim.simulate import rare_garbage_collection, simulate
from tandem.workload.source import open_workload

POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)
TRACE = "mooncake_conversation.jsonl.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSetting:
    """Settings that all compared policies share."""

    workload: str
    pools: str
    speedup: float
    count: int | None
    rate: float | None = None
    disaggregation: Disaggregation = "prefer"
    remote_prefix: bool = True
    index_delay_s: float = 0.05
    budget: int = 8192
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RoutingOutcome:
    """Results of one routing policy.

    `remote_hit_share` is the share of prompt tokens read from other workers' caches; they also count as cached.
    """

    policy: str
    report: SimulationReport
    local_share: float
    remote_hit_share: float
    wall_s: float


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    folder = os.environ.get("TANDEM_TRACES", "")
    path = Path(folder) / TRACE
    if not args.workload and (not folder or not path.is_file()):
        sys.stderr.write(f"loadtest routing: set TANDEM_TRACES to a folder with {TRACE}\n")
        return 1
    setting = RoutingSetting(
        workload=args.workload or str(path), pools=args.pools, speedup=args.speedup, count=args.count, rate=args.rate,
        disaggregation=args.disaggregation, remote_prefix=args.remote_prefix, budget=args.budget,
        index_delay_s=args.index_delay_ms / 1e3,
    )  # fmt: skip
    sys.stdout.write(f"{setting}\n")
    outcomes = [_printed(compare(setting, policy)) for policy in args.policies.split(",")]
    sys.stdout.write(report_text(outcomes))
    return 0


def compare(setting: RoutingSetting, policy: RoutingPolicy) -> RoutingOutcome:
    """Simulate one policy to its end and return its results. Raises AssertionError when requests or blocks are left
    over."""
    config = Config(
        engine=EngineConfig(max_num_batched_tokens=setting.budget, max_num_seqs=256),
        gateway=GatewayConfig(
            routing_policy=policy, disaggregation=setting.disaggregation, remote_prefix=setting.remote_prefix,
            max_queued=10**6, queue_timeout_s=1e6, progress_timeout_s=1e6,
        ),
    )  # fmt: skip
    machine = roofline_machine(Roofline(SHAPES["llama-3.1-8b"], HARDWARE["h200"]))
    deployment = Deployment(machine=machine, pools=parse_pools(setting.pools), config=config)
    spec = replace(deployment.cluster(setting.seed), index_delay_s=setting.index_delay_s)
    requests = open_workload(
        setting.workload, seed=setting.seed, count=setting.count, rate=setting.rate, speedup=setting.speedup
    )
    clock = SystemClock()
    began, num_local, num_prompt = clock.now(), 0, 0
    seen: set[SimCluster] = set()

    def each(trace: ClientTrace) -> None:
        nonlocal num_local, num_prompt
        num_local += not trace.path.startswith("remote")
        num_prompt += trace.num_prompt

    with rare_garbage_collection():
        report, _ = simulate(spec, requests, Slo(), each=each, look=lambda cluster, _: seen.add(cluster))
    (cluster,) = seen
    remote_hit_share = cluster.num_remote_hit_tokens / num_prompt
    return RoutingOutcome(policy, report, num_local / report.num_requests, remote_hit_share, clock.now() - began)


def report_text(outcomes: Sequence[RoutingOutcome]) -> str:
    """Return the outcomes as a Markdown table."""
    return table(
        ("policy", "cached", "read from others", "TTFT p50, ms", "p99", "ITL p99, ms", "local", "failed"),
        list(map(_row, outcomes)),
    )


def _row(outcome: RoutingOutcome) -> tuple[str, ...]:
    whole = outcome.report.groups[0]
    ttft, itl = whole.ttft, whole.itl
    assert ttft is not None and itl is not None, "no request was served"
    return (
        outcome.policy,
        f"{outcome.report.cached_share:.1%}",
        f"{outcome.remote_hit_share:.1%}",
        ms(ttft.p50),
        ms(ttft.p99),
        ms(itl.p99),
        f"{outcome.local_share:.0%}",
        str(whole.num_requests - whole.num_complete),
    )


def _printed(outcome: RoutingOutcome) -> RoutingOutcome:
    sys.stderr.write(f"{outcome.policy}: {outcome.wall_s:.0f} s\n")
    return outcome


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest routing", description="Compare ways to choose workers.")
    parser.add_argument("--policies", default=",".join(POLICIES), help="default: all")
    parser.add_argument("--workload", default="", help="a mix, or a file of one or of a trace (default: the trace)")
    parser.add_argument("--rate", type=float, default=None, help="requests per second of a mix")
    parser.add_argument("--pools", default="prefill=4,decode=4")
    parser.add_argument("--speedup", type=float, default=3.0, help="times the trace's own pace (default: 3)")
    parser.add_argument("--count", type=int, default=None, help="requests (default: the whole trace)")
    parser.add_argument("--disaggregation", choices=get_args(Disaggregation), default="prefer")
    parser.add_argument("--remote-prefix", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--index-delay-ms", type=float, default=50.0)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a full step (default: 8192)")
    return parser
