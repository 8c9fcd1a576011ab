"""Run a day's load with or without an autoscaler, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loadtest.cluster.diurnal_load import Day, requests
from tandem.core.clock import SystemClock
from tandem.core.config import Config, EngineConfig, GatewayConfig, PlannerConfig
from tandem.core.slo import Slo
from tandem.scaling.cluster_state import ClusterState
from tandem.scaling.decision import ReplicaTarget
from tandem.scaling.scaler import Scaler
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cost.hardware import HARDWARE
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.cost.roofline import SERVING, Roofline
from tandem.sim.machines.deployment import Deployment, PoolSize
from tandem.sim.machines.machine import roofline_machine
from tandem.sim.report.report import LatencyStats
from tandem.sim.scaling.autoscale import Autoscaler, ElasticRun, ElasticSpec, ScalerAdapter, simulate_elastic
from tandem.sim.scaling.queue_scaler import QueuePolicy, QueueScaler
from tandem.sim.simulate import rare_garbage_collection
from tandem.workload.trace_reader import entries

BUDGET = 8192
BLOCK_SIZE = 128
FOR_EVER_S = 1e6
NUM_PARTS = 10
"""Number of equal parts of a day; attainment is also computed for each part."""


@dataclass(frozen=True, slots=True)
class AutoscalerConfig:
    """Source of the number of workers in a run: an autoscaler, or fixed numbers.

    `kind`: which autoscaler, or `fixed`. `numbers`: for `fixed` the prefill and decode workers; for `queue` the target
    requests per prefill and per decode worker.
    """

    kind: Literal["planner", "queue", "fixed"]
    numbers: tuple[int, int] = (0, 0)

    @classmethod
    def parse(cls, text: str) -> AutoscalerConfig:
        """Parse `planner`, `queue=2:16` or `fixed=8+3`. Raises ValueError."""
        kind, _, rest = text.strip().partition("=")
        if kind == "planner" and not rest:
            return cls("planner")
        if kind in ("queue", "fixed"):
            first, second = rest.split(":" if kind == "queue" else "+")
            return cls(kind, (int(first), int(second)))  # type: ignore[arg-type]
        raise ValueError(f"{text!r} is none of planner, queue=N:N and fixed=N+N")

    def __str__(self) -> str:
        first, second = self.numbers
        match self.kind:
            case "planner":
                return "planner"
            case "queue":
                return f"queue, {first} and {second} each"
            case "fixed":
                return f"{first} + {second}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """A recorded trace, the hardware that serves it and the SLO of its clients.

    `degree`: accelerators of a worker. `begins`: workers of each role at the start of the run. `configs`: the
    autoscalers that are compared under this load.
    """

    trace: str
    day: Day
    hardware: str
    degree: int
    slo: Slo
    begins: ReplicaTarget
    policy: PlannerConfig
    configs: Sequence[AutoscalerConfig]


def _policy(scale_down_s: float = 300.0) -> PlannerConfig:
    """Return the defaults of `tandem planner`, adapted to a simulated day.

    Simulated workers keep their roles and, where traffic has no bursts of minutes, end sooner, because the day is 24
    times as short.
    """
    return PlannerConfig(scale_down_s=scale_down_s, change_roles=False)


def _configs(*texts: str) -> tuple[AutoscalerConfig, ...]:
    return tuple(map(AutoscalerConfig.parse, texts))


_CHAT = Slo(ttft_s=15.0, itl_s=0.1)
_CODE = Slo(ttft_s=3.0, itl_s=0.1)
LOADS = {
    "conversation": OfferedLoad(
        trace="mooncake_conversation.jsonl.gz",
        day=Day(num_copies=3, lasts_s=3600.0, low=0.2),
        hardware="h100",
        degree=4,
        slo=_CHAT,
        begins=ReplicaTarget(3, 1),
        policy=_policy(scale_down_s=60.0),
        configs=_configs(
            "planner", "fixed=11+4", "fixed=12+3", "fixed=9+3", "queue=2:16", "fixed=8+4", "fixed=10+4", "fixed=12+4"
        ),
    ),
    "code": OfferedLoad(
        trace="azure_llm_code_2023.csv.gz",
        day=Day(num_copies=3, lasts_s=3600.0, low=0.2),
        hardware="h200",
        degree=2,
        slo=_CODE,
        begins=ReplicaTarget(3, 1),
        policy=_policy(),
        configs=_configs("planner", "queue=2:16", "fixed=7+1", "fixed=8+1", "fixed=10+1", "fixed=13+1", "fixed=13+2"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleOutcome:
    """Results of one run under an autoscaler.

    `late_share` of the requests got their first token late or none; `late_gap_share` of the gaps were late.
    `worst_share` is the smallest share of good requests over the parts of the day.
    """

    config: AutoscalerConfig
    percentile: float
    num_requests: int
    gpu_hours: float
    good_share: float
    worst_share: float
    late_share: float
    late_gap_share: float
    ttft_p99_s: float
    itl_p99_s: float
    mean_prefill: float
    mean_decode: float
    most_prefill: int
    most_decode: int
    wall_s: float


class _Fixed:
    """Scaler that keeps the current numbers of workers."""

    def target(self, observed: ClusterState, ongoing: ReplicaTarget) -> ReplicaTarget:
        return ReplicaTarget(observed.prefill.num_kept, observed.decode.num_kept)


def run(load: OfferedLoad, trace: Path, config: AutoscalerConfig) -> AutoscaleOutcome:
    """Simulate the load to its end, and return the results.

    Raises AssertionError where the simulation leaves requests or blocks behind.
    """
    clock = SystemClock()
    began = clock.now()
    size = ReplicaTarget(*config.numbers) if config.kind == "fixed" else load.begins
    spec = cluster(load, size)
    kinds = {kind.pool: kind for kind, _ in spec.workers}
    elastic = ElasticSpec(
        kinds={"prefill": kinds["prefill"], "decode": kinds["decode"]},
        degrees={"prefill": load.degree, "decode": load.degree},
        interval_s=load.policy.interval_s,
        start_s=load.policy.start_s,
    )
    scheduled = requests(load.day, list(entries(trace)))
    parts = [LatencyStats(load.slo) for _ in range(NUM_PARTS)]

    def record_part(trace: ClientTrace) -> None:
        parts[min(NUM_PARTS - 1, int(NUM_PARTS * trace.due_s / load.day.lasts_s))].add(trace)

    with rare_garbage_collection():
        done = simulate_elastic(spec, elastic, autoscaler(load, config), scheduled, load.slo, on_ended=record_part)
    shares = [whole.num_good / whole.num_requests for part in parts if (whole := part.all()).num_requests]
    return _outcome(load, config, done, min(shares), clock.now() - began)


def autoscaler(load: OfferedLoad, config: AutoscalerConfig) -> Autoscaler:
    match config.kind:
        case "planner":
            return ScalerAdapter(Scaler(load.policy, load.slo))
        case "queue":
            return QueueScaler(QueuePolicy(ongoing_per_worker=(float(config.numbers[0]), float(config.numbers[1]))))
        case "fixed":
            return _Fixed()


def cluster(load: OfferedLoad, size: ReplicaTarget) -> ClusterSpec:
    """Return the spec of the cluster with `size` workers, whose queue has no limit.

    A request that is not served in time counts as late. Dropping waiting requests would make a fleet that is too small
    look better.
    """
    config = Config(
        engine=EngineConfig(max_num_batched_tokens=BUDGET, max_num_seqs=256, block_size=BLOCK_SIZE),
        gateway=GatewayConfig(
            disaggregation="prefer", max_queued=10**6, queue_timeout_s=FOR_EVER_S, progress_timeout_s=FOR_EVER_S
        ),
    )
    machine = roofline_machine(Roofline(SHAPES["llama-3.1-70b"], HARDWARE[load.hardware], efficiency=SERVING))
    pools = (PoolSize("prefill", size.prefill, load.degree), PoolSize("decode", size.decode, load.degree))
    return Deployment(machine=machine, pools=pools, config=config).cluster(load.day.seed)


def _outcome(
    load: OfferedLoad, config: AutoscalerConfig, done: ElasticRun, worst_share: float, wall_s: float
) -> AutoscaleOutcome:
    whole = done.tally.all()
    everyone = done.report.groups[0]
    assert everyone.ttft is not None and everyone.itl is not None, "no request was served"
    moments = done.moments
    return AutoscaleOutcome(
        config=config,
        percentile=load.policy.percentile,
        num_requests=whole.num_requests,
        gpu_hours=done.gpu_hours,
        good_share=done.report.good_share,
        worst_share=worst_share,
        late_share=whole.num_late / whole.num_requests,
        late_gap_share=whole.num_late_gaps / max(1, whole.itl.count),
        ttft_p99_s=everyone.ttft.p99,
        itl_p99_s=everyone.itl.p99,
        mean_prefill=sum(moment.serving.prefill for moment in moments) / len(moments),
        mean_decode=sum(moment.serving.decode for moment in moments) / len(moments),
        most_prefill=max(moment.serving.prefill for moment in moments),
        most_decode=max(moment.serving.decode for moment in moments),
        wall_s=wall_s,
    )
