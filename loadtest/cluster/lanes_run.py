"""Simulate one cluster with a chat and batch requests, and measure what both get while the load is steady."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from tandem.core.config import Bytes, Config, EngineConfig, GatewayConfig, LanesConfig
from tandem.core.ids import RequestId, TenantId
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cost.hardware import HARDWARE
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.cost.roofline import Roofline
from tandem.sim.machines.deployment import Deployment, parse_pools
from tandem.sim.machines.machine import roofline_machine
from tandem.workload.lengths import Lengths, LogNormal
from tandem.workload.mix import Mix, scheduled_requests
from tandem.workload.request_class import RequestClass
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.trace_reader import replay

BATCH = "batch"
STEP_TOKENS, BLOCK_TOKENS = 2048, 64
SEED = 0
MOST = 4.0
"""The most that is offered, as a multiple of what the cluster serves."""


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """Kind of batch requests.

    `output`: the least and the most tokens of an answer. `flood_rate`: requests per second of which the cluster serves
    only a part. `offers`: the rates to compare, as multiples of what it serves. `begin_s`, `end_s`: the virtual time in
    which tokens and chat requests count; the load goes on until the last of these chat requests has ended."""

    prompt: Lengths
    output: tuple[int, int]
    flood_rate: float
    offers: tuple[float, ...]
    begin_s: float
    end_s: float


LOADS = {
    "summaries": BatchLoad((4000, 12_000), (50, 150), 60.0, (0.5, 1.0, 2.0, MOST), 15.0, 75.0),
    "answers": BatchLoad(LogNormal(2000, 0.5, 500, 8000), (400, 1200), 60.0, (MOST,), 15.0, 45.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSetup:
    """Configuration of one row.

    `has_lanes`: batch requests have a lane of their own. `is_aborting`: a batch request that yields is aborted, and its
    client sends it again from the start. `reuses_kv`: decode workers have a prefix cache, from which a request that has
    yielded goes on. `host_memory`: bytes of each decode worker for KV that the pool evicts."""

    name: str
    pools: str = "prefill=4,decode=4"
    has_lanes: bool = True
    max_preemptions: int = 2
    is_aborting: bool = False
    reuses_kv: bool = True
    host_memory: int = 0
    batch_max_share: float = 1.0


@dataclass(slots=True)
class LaneOutcome:
    """Results of one run.

    - `ttft_s`, `gaps_s`: of the chat requests that are due in the counted time.
    - `num_batch_tokens`: batch tokens that were delivered in the counted time by attempts that were not aborted.
    - Of the whole run: `num_failed` requests; `num_aborted` attempts; `num_yields`; `num_again` tokens that were
      computed more than once, or lost; `num_loaded` tokens whose KV came back from host memory; `pause_s`, the longest
      time between two batch tokens; `num_queued` requests that waited at the end.
    """

    seconds: float
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_batch_tokens: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_yields: int = 0
    num_again: int = 0
    num_loaded: int = 0
    pause_s: float = 0.0
    num_queued: int = 0

    @property
    def batch_rate(self) -> float:
        return self.num_batch_tokens / self.seconds


def capacity(load: BatchLoad, flooded: LaneOutcome) -> float:
    """Return the batch requests per second that a cluster without a chat serves; `flooded` is a run at a higher rate.

    Raises ValueError where no request waited at its end, because the cluster could then have served more."""
    if not flooded.num_queued:
        raise ValueError(f"no batch request waits at {load.flood_rate} requests/s: this does not saturate the cluster")
    return flooded.batch_rate / (sum(load.output) / 2)


@dataclass(frozen=True, slots=True)
class ChatTrace:
    """A chat: the requests of the trace at `path` from number `first` on, at their own pace."""

    path: Path
    first: int = 0

    def requests(self) -> Iterator[ScheduledRequest]:
        begin_s: float | None = None
        for one in islice(replay(self.path, SEED), self.first, None):
            begin_s = one.due_s if begin_s is None else begin_s
            request = replace(one.request, tenant=TenantId("acme"))
            yield replace(one, group="chat", request=request, due_s=one.due_s - begin_s)


def requests(load: BatchLoad, setup: LaneSetup, rate: float, chat: ChatTrace | None) -> Iterator[ScheduledRequest]:
    """Yield the requests of a chat beside `rate` batch requests per second of another tenant, without end.

    Equal arguments give equal requests, and the chat's do not depend on the others."""
    lane = Lane.BATCH if setup.has_lanes else Lane.INTERACTIVE
    group = RequestClass(BATCH, 1.0, load.prompt, load.output, tenant="initech", lane=lane)
    batch = (
        replace(one, request=replace(one.request, id=RequestId(f"b{one.request.id}")))
        for one in (scheduled_requests(Mix((group,)), SEED, rate=rate) if rate else ())
    )
    return heapq.merge(chat.requests() if chat is not None else (), batch, key=lambda one: one.due_s)


class AbortingClients:
    """Abort the requests that yield to a more urgent lane, and send them again from their start at once.

    `num_aborted`: attempts that were aborted; `num_lost`: the tokens that their clients had received."""

    def __init__(self, cluster: SimCluster) -> None:
        self.num_lost = 0
        self._cluster = cluster
        self._aborted: set[RequestId] = set()
        self._had: dict[RequestId, tuple[int, float]] = {}
        cluster.on_preempted = self.abort
        cluster.retry = self.retry

    @property
    def num_aborted(self) -> int:
        return len(self._aborted)

    def abort(self, request: RequestId) -> None:
        if request not in self._aborted:
            self._aborted.add(request)
            self._cluster.close(request)

    def retry(self, scheduled: ScheduledRequest, trace: ClientTrace) -> ScheduledRequest | None:
        """Return the next attempt of an aborted request, due now under another id; None for one that was not
        aborted."""
        if trace.id not in self._aborted:
            return None
        self.num_lost += len(trace.token_times)
        again = replace(scheduled.request, id=RequestId(f"{trace.id}+"))
        had = (len(trace.token_times), trace.token_times[-1] if trace.token_times else self._cluster.now)
        self._had[again.id] = max(had, self._had.get(trace.id, (0, 0.0)))
        return replace(scheduled, request=again, due_s=self._cluster.now)

    def is_aborted(self, request: RequestId) -> bool:
        return request in self._aborted

    def is_retry(self, request: RequestId) -> bool:
        return request in self._had

    def pause_s(self, trace: ClientTrace) -> float:
        """Return how long the client of a retry has waited, from its last token until the first that it had not got
        before, or until now; 0 for a first attempt."""
        if trace.id not in self._had:
            return 0.0
        number, since = self._had[trace.id]
        return (trace.token_times[number] if number < len(trace.token_times) else self._cluster.now) - since


class _Over(Exception):
    """Raised to end a run whose counted requests have all ended."""


class LaneRun:
    """Run one setup once; `outcome` has the results after `run`."""

    def __init__(self, setup: LaneSetup, load: BatchLoad) -> None:
        self.outcome = LaneOutcome(load.end_s - load.begin_s)
        self._load = load
        self._cluster = SimCluster(cluster_spec(setup))
        self._clients = AbortingClients(self._cluster) if setup.is_aborting else None
        self._num_open = 0

    def run(self, sent: Iterator[ScheduledRequest]) -> LaneOutcome:
        """Simulate until all chat requests that are due in the counted time have ended, and return the results."""
        cluster, found = self._cluster, self.outcome
        with contextlib.suppress(_Over):
            cluster.run(sent, self._ended, sent=self._sent, computed=self._computed)
        for trace in cluster.open_traces():
            if trace.group == BATCH:
                self._count_batch(trace)
                if trace.token_times:
                    found.pause_s = max(found.pause_s, cluster.now - trace.token_times[-1])
        found.num_queued = cluster.num_queued
        found.num_yields = sum(worker.engine.num_preempted for worker in cluster.workers)
        found.num_again += sum(w.num_prefill_tokens for w in cluster.workers if w.spec.pool == "decode")
        found.num_loaded = BLOCK_TOKENS * sum(worker.num_loaded_blocks for worker in cluster.workers)
        if self._clients is not None:
            found.num_aborted = self._clients.num_aborted
            found.num_again += self._clients.num_lost
        return found

    def _is_counted(self, at_s: float) -> bool:
        return self._load.begin_s <= at_s < self._load.end_s

    def _sent(self, scheduled: ScheduledRequest) -> None:
        self._num_open += scheduled.group != BATCH and self._is_counted(scheduled.due_s)
        self._look()

    def _ended(self, trace: ClientTrace) -> None:
        is_aborted = self._clients is not None and self._clients.is_aborted(trace.id)
        self.outcome.num_failed += not (trace.is_complete or is_aborted)
        if trace.group == BATCH:
            self._count_batch(trace)
        elif self._is_counted(trace.due_s):
            self._num_open -= 1
            if trace.is_complete:
                self.outcome.ttft_s.append(trace.ttft_s)
                self.outcome.gaps_s += trace.gaps_s
            self._look()

    def _look(self) -> None:
        if not self._num_open and self._cluster.now >= self._load.end_s:
            raise _Over

    def _computed(self, request: Request, num_cached: int) -> None:
        if self._clients is not None and self._clients.is_retry(request.id):
            self.outcome.num_again += len(request.prompt_tokens) - num_cached

    def _count_batch(self, trace: ClientTrace) -> None:
        found, clients = self.outcome, self._clients
        if clients is not None and clients.is_aborted(trace.id):
            return
        found.num_batch_tokens += sum(map(self._is_counted, trace.token_times))
        found.pause_s = max(found.pause_s, max(trace.gaps_s, default=0.0))
        if clients is not None:
            found.pause_s = max(found.pause_s, clients.pause_s(trace))


def cluster_spec(setup: LaneSetup) -> ClusterSpec:
    """Return the cluster of a setup: Llama-3.1-8B, one H200 per worker, with the cache settings of the setup
    on its decode workers."""
    config = Config(
        engine=EngineConfig(max_num_batched_tokens=STEP_TOKENS, block_size=BLOCK_TOKENS),
        gateway=GatewayConfig(max_queued=10**6, queue_timeout_s=1e6, progress_timeout_s=1e6),
        lanes=LanesConfig(max_preemptions=setup.max_preemptions, batch_max_share=setup.batch_max_share),
    )
    machine = roofline_machine(Roofline(SHAPES["llama-3.1-8b"], HARDWARE["h200"]))
    spec = Deployment(machine=machine, pools=parse_pools(setup.pools), config=config).cluster(SEED)
    engine = replace(config.engine, host_cache_memory=Bytes(setup.host_memory), enable_prefix_caching=setup.reuses_kv)
    decode = replace(config, engine=engine)
    workers = tuple(
        (replace(kind, config=decode) if kind.pool == "decode" else kind, number) for kind, number in spec.workers
    )
    return replace(spec, workers=workers)
