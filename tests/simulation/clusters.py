"""Small simulated clusters and their workloads for tests. No part is faked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tandem.core.config import Config, EngineConfig, GatewayConfig, HandoffConfig, Pool
from tandem.core.ids import RequestId
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams
from tandem.core.step_cost import StepCost
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.faults import Fault
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.hardware import H200
from tandem.sim.cost.model_shapes import LLAMA_8B, SHAPES
from tandem.sim.cost.roofline import Efficiency, Roofline
from tandem.workload.scheduled_request import MODEL, ScheduledRequest
from tandem.workload.source import open_workload

LAPTOP = StepCost(20e-3, 1.3e-3, 0.8e-3, 0.9e-6, 0.6e-6)
"""About two cores with the small model, in seconds."""
GPU = Roofline(LLAMA_8B, H200, efficiency=Efficiency(overhead_s=1e-3))


def slow_spec(pool: Pool = "mixed", **changes: object) -> WorkerSpec:
    """Return a worker of the small model on a laptop; `changes` are fields of `WorkerSpec`."""
    spec = WorkerSpec(
        pool=pool,
        layout=SHAPES["smollm2-135m"].layout(16),
        num_blocks=2000,
        step_time=LAPTOP.predict,
        bandwidth=1e9,
        config=Config(),
        calibration=LAPTOP,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def gpu_spec(pool: Pool = "mixed", **engine: object) -> WorkerSpec:
    """Return a worker with Llama-3.1-8B on one H200; `engine` are fields of `EngineConfig`."""
    settings: dict[str, object] = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, **engine}
    return WorkerSpec.of(pool, GPU, Config(engine=EngineConfig(**settings)))  # type: ignore[arg-type]


def handing_over(**changes: object) -> Config:
    """Return a configuration with these handoff deadlines in seconds."""
    return Config(handoff=HandoffConfig(**changes))  # type: ignore[arg-type]


def cluster_spec(*workers: tuple[WorkerSpec, int]) -> ClusterSpec:
    return ClusterSpec(workers=workers, gateway=GatewayConfig())


def cluster(
    *workers: tuple[WorkerSpec, int], gateway: GatewayConfig | None = None, seed: int = 0, latency_s: float = 2e-4
) -> SimCluster:
    return SimCluster(
        replace(cluster_spec(*workers), gateway=gateway or GatewayConfig(), seed=seed, latency_s=latency_s)
    )


def mix(seed: int, count: int, rate: float) -> list[ScheduledRequest]:
    return list(open_workload("mix", seed=seed, count=count, rate=rate))


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Return tokens that begin like those of no other seed."""
    return tuple((seed * 7919 + i) % 30_000 for i in range(length))


def scheduled(
    number: int,
    due_s: float,
    tokens: tuple[int, ...],
    max_tokens: int = 4,
    *,
    seed: int | None = None,
    lane: Lane = Lane.INTERACTIVE,
) -> ScheduledRequest:
    """Return a request whose answer has the tokens of `seed`, or where that is None of its number."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=number if seed is None else seed)
    request = Request(id=RequestId(f"r{number}"), model=MODEL, prompt_tokens=tokens, lane=lane, sampling=sampling)
    return ScheduledRequest(request, "", due_s)


def traces_of(
    one: SimCluster,
    workload: Iterable[ScheduledRequest],
    closed_at: Iterable[tuple[float, RequestId]] = (),
    faults: Sequence[Fault] = (),
) -> list[ClientTrace]:
    """Run a cluster, check that nothing is left open, and return the traces in the order of the requests' numbers."""
    traces: list[ClientTrace] = []
    one.run(workload, traces.append, closed_at, faults)
    one.check()
    return sorted(traces, key=lambda trace: tuple(map(int, trace.id.removeprefix("r").split("."))))


def run(one: SimCluster, workload: Iterable[ScheduledRequest]) -> list[ClientTrace]:
    """Run and check all that holds for every run: each request ends once, and well; nothing is left open."""
    schedule = list(workload)
    traces = traces_of(one, schedule)
    assert [trace.id for trace in traces] == [scheduled.request.id for scheduled in schedule]
    bad = [(trace.id, trace.outcome) for trace in traces if not trace.is_complete]
    assert not bad, bad
    assert one.now < max(trace.ended_at for trace in traces) + 1.0, "a lease lapsed that should have been released"
    return traces
