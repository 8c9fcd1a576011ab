"""Random faults on a large simulated cluster under random load, as functions of a seed, and what must hold whatever
they are; never a fake part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from tandem.core.config import (
    Bytes,
    Config,
    EngineConfig,
    GatewayConfig,
    HandoffConfig,
    LanesConfig,
    Pool,
    WorkerConfig,
)
from tandem.core.errors import TandemError
from tandem.core.events import Finished, Token
from tandem.core.ids import RequestId
from tandem.core.lane import ALL_LANES, Lane
from tandem.core.request import Request, SamplingParams
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.faults import Fault, FaultKind
from tandem.sim.cost.executor import token_at
from tandem.workload.scheduled_request import MODEL, ScheduledRequest
from tests.simulation.clusters import slow_spec

POOLS: dict[Pool, int] = {"prefill": 20, "decode": 24, "mixed": 6}
NUM_GATEWAYS = 3
NUM_REQUESTS = 40
CROWDED_POOLS: dict[Pool, int] = {"prefill": 2, "decode": 3, "mixed": 1}
NUM_CROWDED_GATEWAYS = 2
NUM_CROWDING = 16
ARRIVALS_S = 4.0
STRIKES_S = 6.0
"""Faults strike from the beginning until then."""
RESTART_S = 3.0
"""At least, between two faults of one worker."""
KINDS: dict[FaultKind, float] = {
    "kill": 3, "drain": 2, "stall": 2, "cut gateways": 2, "cut gateway": 1, "cut peer": 3, "slow": 1,
}  # fmt: skip
CONFIG = Config(
    engine=EngineConfig(max_num_batched_tokens=256, max_num_seqs=8),
    handoff=HandoffConfig(lease_s=2.0, pull_timeout_s=4.0, drain_timeout_s=2.0),
    worker=WorkerConfig(gateway_grace_s=3.0, drain_s=5.0),
)
GATEWAY = GatewayConfig(worker_timeout_s=3.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`closed_at`: when which clients leave."""

    spec: ClusterSpec
    requests: tuple[tuple[float, Request], ...]
    closed_at: tuple[tuple[float, RequestId], ...]
    faults: tuple[Fault, ...]

    def schedule(self) -> list[ScheduledRequest]:
        return [ScheduledRequest(request, "", due_s) for due_s, request in self.requests]


def scenario(seed: int) -> Scenario:
    """At every moment one worker at least that prefills and one that decodes are whole, and linked."""
    rng = Random(f"faults {seed}")
    spec = replace(slow_spec(), num_blocks=150, config=CONFIG, max_run=1)
    workers = tuple((replace(spec, pool=pool), number) for pool, number in POOLS.items())
    requests = tuple(_request(rng, index) for index in range(NUM_REQUESTS))
    leaving = rng.sample(requests, 3)
    return Scenario(
        ClusterSpec(workers=workers, gateway=GATEWAY, num_gateways=NUM_GATEWAYS, seed=seed),
        tuple(sorted(requests, key=lambda pair: pair[0])),
        tuple((due_s + rng.uniform(0.0, 2.0), request.id) for due_s, request in leaving),
        tuple(_faults(rng, POOLS, NUM_GATEWAYS)),
    )


def crowded_scenario(seed: int) -> Scenario:
    """Return a scenario of few workers with few seats and blocks, on which requests of all lanes preempt each other,
    are kept in host memory, and move between workers."""
    rng = Random(f"crowd {seed}")
    base = slow_spec()
    host_blocks = rng.choice([0, 20, 200])
    config = replace(
        CONFIG,
        engine=replace(
            CONFIG.engine,
            max_num_seqs=rng.choice([1, 2, 4]),
            host_cache_memory=Bytes(host_blocks * base.layout.block_bytes),
        ),
        lanes=LanesConfig(
            max_preemptions=rng.choice([1, 2, 8]),
            max_pause_s=rng.choice([0.5, 5.0]),
            batch_max_share=rng.choice([0.5, 1.0, 1.0]),
        ),
    )
    spec = replace(base, num_blocks=rng.choice([60, 150]), config=config, max_run=1)
    lanes = [ALL_LANES, ALL_LANES, frozenset({Lane.BATCH}), frozenset({Lane.INTERACTIVE, Lane.STANDARD})]
    workers = tuple(
        (replace(spec, pool=pool, lanes=ALL_LANES if number == 0 else rng.choice(lanes)), 1)
        for pool, count in CROWDED_POOLS.items()
        for number in range(count)
    )
    requests = tuple(_crowding_request(rng, index) for index in range(NUM_CROWDING))
    leaving = rng.sample(requests, 2)
    gateway = replace(GATEWAY, rebalance="on", rebalance_min_gain=0.05, rebalance_max_moves=3, queue_timeout_s=600.0)
    return Scenario(
        ClusterSpec(workers=workers, gateway=gateway, num_gateways=NUM_CROWDED_GATEWAYS, seed=seed),
        tuple(sorted(requests, key=lambda pair: pair[0])),
        tuple((due_s + rng.uniform(0.0, 2.0), request.id) for due_s, request in leaving),
        tuple(_faults(rng, CROWDED_POOLS, NUM_CROWDED_GATEWAYS)),
    )


def _crowding_request(rng: Random, index: int) -> tuple[float, Request]:
    lane = rng.choice([Lane.INTERACTIVE, Lane.STANDARD, Lane.BATCH, Lane.BATCH])
    due_s, request = _request(rng, index)
    num_tokens = rng.choice([30, 60, 120] if lane is Lane.BATCH else [2, 10, 40])
    return due_s, replace(request, lane=lane, sampling=replace(request.sampling, max_tokens=num_tokens))


def _request(rng: Random, index: int) -> tuple[float, Request]:
    """Some begin alike."""
    shared = rng.choice([0, 0, 48, 96])
    length = rng.choice([1, 10, 60, 200, 600])
    tokens = (7,) * shared + tuple(rng.randrange(1000, 2000) for _ in range(length))
    request = Request(
        id=RequestId(f"r{index}"),
        model=MODEL,
        prompt_tokens=tokens,
        num_choices=rng.choice([1, 1, 1, 2, 3]),
        sampling=SamplingParams(max_tokens=rng.choice([1, 2, 10, 30]), seed=index),
    )
    return rng.uniform(0.0, ARRIVALS_S), request


def _faults(rng: Random, pools: Mapping[Pool, int], num_gateways: int) -> Iterator[Fault]:
    """Of half of the workers, each with a line of its own; the first of each pool are never struck."""
    firsts, total = _firsts(pools), sum(pools.values())
    for worker in rng.sample([index for index in range(total) if index not in firsts], total // 2):
        at_s = rng.uniform(0.0, STRIKES_S)
        while at_s < STRIKES_S:
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            lasts_s = rng.choice([0.2, 1.0, 2.5, 5.0])
            ends = num_gateways if kind == "cut gateway" else total
            other = rng.choice([index for index in range(ends) if index != worker or kind != "cut peer"])
            yield Fault(at_s=at_s, kind=kind, worker=worker, other=other, lasts_s=lasts_s)
            at_s += lasts_s + RESTART_S + rng.uniform(0.0, STRIKES_S)
    if rng.random() < 0.3:
        yield Fault(at_s=rng.uniform(0.0, STRIKES_S), kind="lose registry", worker=0, lasts_s=rng.uniform(1.0, 6.0))


def _firsts(pools: Mapping[Pool, int]) -> set[int]:
    found, first = set(), 0
    for number in pools.values():
        found.add(first)
        first += number
    return found


@dataclass(slots=True)
class Witness:
    """Check what the clients of a scenario receive, when they receive it."""

    requests: dict[RequestId, Request]
    seen: dict[tuple[RequestId, int], int] = field(default_factory=lambda: defaultdict(int))
    outcomes: dict[RequestId, Finished | TandemError] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)

    def delivered(self, token: Token) -> None:
        place = token.key.request, token.key.choice
        assert place[0] not in self.outcomes, f"{token} after the end"
        assert token.index == self.seen[place], f"{token} comes after {self.seen[place]} tokens"
        right = token_at(self.requests[place[0]].sampling.seed, token.key.choice, token.index)
        assert token.token.id == right, f"{token} is not {right}"
        self.seen[place] += 1

    def ended(self, trace: ClientTrace) -> None:
        assert trace.id not in self.outcomes and trace.outcome is not None, f"{trace.id} ended twice"
        self.outcomes[trace.id] = trace.outcome
        self.paths.append(trace.path)

    def check(self, closed: Sequence[RequestId]) -> None:
        assert self.outcomes.keys() == self.requests.keys(), f"no end: {self.requests.keys() - self.outcomes.keys()}"
        for name, outcome in self.outcomes.items():
            if name in closed and isinstance(outcome, TandemError):
                continue
            assert isinstance(outcome, Finished), f"{name}: {outcome.kind}: {outcome}"
            request = self.requests[name]
            counts = [self.seen[name, choice] for choice in range(request.num_choices)]
            assert counts == [request.sampling.max_tokens] * request.num_choices, f"{name}: {counts} tokens"


def run(one: Scenario) -> tuple[SimCluster, Witness]:
    """Run a scenario and check all that holds for every seed."""
    witness = Witness({request.id: request for _, request in one.requests})
    cluster = SimCluster(one.spec)
    cluster.run(one.schedule(), witness.ended, one.closed_at, one.faults, witness.delivered)
    cluster.check()
    witness.check([name for _, name in one.closed_at])
    return cluster, witness
